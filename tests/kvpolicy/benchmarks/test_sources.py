"""Files as the user names them: found, fetched only from the cache here, and refused in one line."""

import hashlib
from pathlib import Path

import huggingface_hub.constants
import pytest

from kvpolicy.benchmarks.sources import SOURCES, absolute_entry, find_files, parse_entry
from kvpolicy.errors import InputError

HUB_NAME = "hub:owner/rows@main/part one/rows.jsonl"


@pytest.fixture
def cached_hub_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the hub's cache, as huggingface_hub lays it out, and no way to the hub."""
    monkeypatch.setenv("KVP_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    place, commit = tmp_path / "hub" / "datasets--owner--rows", "a" * 40
    path = place / "snapshots" / commit / "part one" / "rows.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("{}\n")
    (place / "refs" / "refs" / "convert").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    (place / "refs" / "refs" / "convert" / "parquet").write_text(commit)
    return path


def test_a_source_may_have_several_files_and_each_has_its_digest(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.json"))
    for path in (first, second, other):
        path.write_text(path.name)
    files = find_files([f"essays={first}", f"squad={other}", f"essays={second}"])
    assert [file.path for file in files.of("essays")] == [first, second]
    assert files.of("boolq") == ()
    assert files.digests() == {
        str(path): hashlib.sha256(path.name.encode()).hexdigest() for path in (first, other, second)
    }


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("squad.json", ("'squad.json'", "SOURCE=PATH")),
        ("squad=", ("'squad='", "SOURCE=PATH")),
        ("books=a.txt", ("'books'", *SOURCES)),
        ("boolq=hub:google/boolq/rows.parquet", ("hub:google/boolq/rows.parquet", "hub:owner/name@revision")),
        ("boolq=hub:boolq@main/rows.parquet", ("hub:boolq@main", "hub:owner/name@revision")),
        ("boolq=hub:google/boolq@main/", ("hub:owner/name@revision",)),
    ],
)
def test_a_wrong_entry_is_refused(fails_in_one_line, entry: str, said: tuple[str, ...]) -> None:
    message = fails_in_one_line(parse_entry, entry)
    assert all(part in message for part in said)


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_that_is_not_there_is_named_with_what_is_needed(fails_in_one_line, source: str, tmp_path: Path) -> None:
    message = fails_in_one_line(find_files, [f"{source}={tmp_path / 'none'}"])
    assert str(tmp_path / "none") in message and SOURCES[source] in message
    assert message == fails_in_one_line(absolute_entry, f"{source}={tmp_path / 'none'}")


def test_a_folder_and_the_home_of_nobody_are_no_files(fails_in_one_line, tmp_path: Path) -> None:
    assert "is no file" in fails_in_one_line(find_files, [f"boolq={tmp_path}"])
    assert "does not exist" in fails_in_one_line(find_files, ["boolq=~nobody-of-that-name/rows.jsonl"])


def test_a_path_may_hold_an_equals_sign_and_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a=b.txt").write_text("x")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(["essays=~/a=b.txt"]).of("essays")[0].path == tmp_path / "a=b.txt"
    monkeypatch.chdir(tmp_path)
    assert absolute_entry("essays=a=b.txt") == f"essays={tmp_path / 'a=b.txt'}"
    assert absolute_entry(f"boolq={HUB_NAME}") == f"boolq={HUB_NAME}"


@pytest.mark.parametrize("name", [HUB_NAME, HUB_NAME.replace("main", "refs%2Fconvert%2Fparquet")])
@pytest.mark.parametrize("fetch", [True, False])
def test_a_file_of_the_hub_that_is_cached_is_read_without_the_hub(
    cached_hub_file: Path, name: str, fetch: bool
) -> None:
    (found,) = find_files([f"boolq={name}"], fetch=fetch).of("boolq")
    assert found.name == name
    assert found.path.read_text() == "{}\n"
    assert list(find_files([f"boolq={name}"]).digests()) == [name]


@pytest.mark.usefixtures("cached_hub_file")
def test_a_file_that_cannot_be_fetched_names_the_local_alternative(fails_in_one_line) -> None:
    other = HUB_NAME.replace("rows.jsonl", "other.jsonl")
    for fetch in (True, False):
        message = fails_in_one_line(find_files, [f"boolq={other}"], fetch=fetch)
        assert other in message and "--data boolq=PATH" in message
    assert "not in the cache" in message
    with pytest.raises(InputError, match="cannot be fetched from the hub"):
        find_files([f"boolq={HUB_NAME.replace('main', 'other')}"])
