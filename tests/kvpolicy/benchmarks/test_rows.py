"""Rows read the same from every format, and what is broken is named with file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_files import write_lines

from kvpolicy.benchmarks.file_rows import FORMATS, Row, read_rows, read_text
from kvpolicy.benchmarks.sources import SOURCES, DataFile
from kvpolicy.errors import InputError

ROWS = [
    {"name": "a", "count": 1, "texts": ["x", "é"], "nested": {"label": ["A"], "rank": None}, "flag": True},
    {"name": "b\n", "count": 2, "texts": [], "nested": {"label": [], "rank": 0.5}, "flag": False},
]


def _file(path: Path) -> DataFile:
    return DataFile(source="boolq", name=path.name, path=path)


def _write(path: Path, rows: list[dict[str, Any]]) -> DataFile:
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_lines(path, rows)
    return _file(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    rows = list(read_rows(_write(tmp_path / f"rows{suffix}", ROWS)))
    assert [row.fields for row in rows] == ROWS
    for row in rows:
        json.dumps(row.fields)  # nothing of numpy's is left
    label = {".json": "entry", ".parquet": "row"}.get(suffix, "line")
    assert [row.place for row in rows] == [f"rows{suffix} {label} {number}" for number in (1, 2)]


@given(st.lists(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text())))
def test_any_json_lines_are_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    assert [row.fields for row in read_rows(_write(path, rows))] == rows


def test_a_mark_of_byte_order_and_empty_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}')
    assert [(row.place, row.fields["a"]) for row in read_rows(_file(path))] == [
        ("rows.jsonl line 1", 1),
        ("rows.jsonl line 4", 2),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": 1', "line 2: not JSON"),
        (b"{'a': 1}", "line 2: not JSON"),
        (b'{"a": "\xe9"}', "line 2: not JSON .*utf-8"),
        (b"[" * 9999, r"line 2: not JSON \(it is nested too deeply\)"),
        (rb'{"a": "\uD800"}', "line 2: not JSON .*surrogates not allowed"),
        (b"[1, 2]", r"line 2: \[1, 2\] is no row"),
        (b'"text"', "line 2: 'text' is no row"),
        (b"null", "line 2: missing is no row"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_broken_line_is_named(line: bytes, said: str, suffix: str, tmp_path: Path) -> None:
    path, content = tmp_path / f"rows{suffix}", b'{"a": 1}\n' + line + b'\n{"a": 3}\n'
    path.write_bytes(gzip.compress(content, mtime=0) if suffix.endswith("gz") else content)
    with pytest.raises(InputError, match=rf"^rows{suffix} {said}.*needed: BoolQ rows"):
        list(read_rows(_file(path)))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.json", b'[{"a": 1},\n{"a": }]', "rows.json line 2: not JSON"),
        ("rows.json", b'{"data": []}', "rows.json holds .*expected a list of rows"),
        ("rows.json", rb'[{"a": "\ud800"}]', "cannot read rows.json: .*surrogates not allowed"),
        ("rows.json", b"[3]", "rows.json entry 1: 3 is no row"),
        ("rows.json", b"\xff", r"rows.json is not UTF-8 text \(byte 0\)"),
        ("rows.parquet", b"PAR1 and nothing of use", "cannot read rows.parquet: .*; boolq must be"),
        (
            "rows.jsonl.gz",
            gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:-20],
            "cannot read rows.jsonl.gz: .* after line",
        ),
        ("rows.jsonl.gz", b'{"a": 1}\n', "cannot read rows.jsonl.gz: .* after line 0"),
        ("rows.csv", b"a,b", r"rows.csv is of no known format, expected one of \.jsonl, "),
    ],
)
def test_a_broken_file_is_one_line(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said) as caught:
        list(read_rows(_file(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(InputError, match=r"cannot read rows\.jsonl"):
        list(read_rows(_file(tmp_path / "rows.jsonl")))
    with pytest.raises(InputError, match=r"cannot read rows\.jsonl"):
        read_text(_file(tmp_path / "rows.jsonl"))


def test_fields_of_another_type_are_named() -> None:
    row = Row(source="mmlu", place="f line 3", fields={"a": 3, "b": ["x", 3], "c": "t", "d": ["x"]})
    assert (row.text("c"), row.texts("d")) == ("t", ("x",))
    for name, said in (("a", "a is 3, expected text"), ("none", "none is missing, expected text")):
        with pytest.raises(InputError, match=rf"^f line 3: {said}; needed: {SOURCES['mmlu'][:9]}"):
            row.text(name)
    with pytest.raises(InputError, match=r"^f line 3: b is \['x', 3\], expected a list of texts"):
        row.texts("b")
