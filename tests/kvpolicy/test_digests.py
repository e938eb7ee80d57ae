from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.digests import digest_bytes, digest_file, digest_folder, digest_json, short_id
from kvpolicy.errors import InputError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_known_digest() -> None:
    assert digest_bytes(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@given(st.dictionaries(st.text(), JSON, min_size=2, max_size=5))
def test_the_order_of_keys_does_not_matter(value: dict[str, Any]) -> None:
    assert digest_json(value) == digest_json(dict(reversed(value.items())))


def test_values_that_differ_have_different_digests() -> None:
    values: list[Any] = [None, True, False, 0, 1, "1", "", [], {}, [1, 2], [2, 1], {"a": 1}, {"a": 2}, {"b": 1}, 0.5]
    assert len({digest_json(value) for value in values}) == len(values)
    assert digest_json((1, 2)) == digest_json([1, 2])


@pytest.mark.parametrize(
    ("value", "place"),
    [({1: 2}, r"\$ has the key 1"), ({"a": [0, math.nan]}, r"\$.a\[1\] is nan"), ({"a": Path()}, r"\$.a is a .*Path")],
)
def test_what_json_would_bend_is_refused(value: Any, place: str) -> None:
    with pytest.raises(InputError, match=place):
        digest_json(value)


def test_a_folder_is_its_names_and_contents(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        (tmp_path / folder / "a").write_bytes(b"alpha")
        (tmp_path / folder / "deep" / "b").write_bytes(b"beta")
    os.utime(tmp_path / "two" / "a", (1, 1))
    before = digest_folder(tmp_path / "one")
    assert digest_folder(tmp_path / "two") == before
    (tmp_path / "two" / "deep" / "b").rename(tmp_path / "two" / "deep" / "c")
    assert digest_folder(tmp_path / "two") != before
    assert digest_file(tmp_path / "one" / "a") == digest_bytes(b"alpha")


def test_missing_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "loop").symlink_to(tmp_path)  # neither a file nor looked into
    assert digest_folder(tmp_path / "closed") == digest_json({})
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "none")
    with pytest.raises(InputError, match="no folder at"):
        digest_folder(tmp_path / "none")


def test_short_id() -> None:
    assert short_id("model", "0123456789abcdef0123") == "model-0123456789abcdef"
