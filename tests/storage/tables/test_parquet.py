"""Small tables of rows: what comes back, what is never half written, and what damage looks like."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from kvpolicy.digests import digest_json
from storage.errors import StorageError
from storage.tables.parquet import read_rows, write_rows

ROWS = [
    {"name": "first", "count": 1, "share": 0.1, "is_kept": True, "parts": ["a", "b"], "note": None},
    {"name": "zwölf ✓\n", "count": -(2**40), "share": -1e300, "is_kept": False, "parts": [], "note": "x" * 5000},
]


def _one_line(error: pytest.ExceptionInfo[StorageError], path: Path) -> None:
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "rows.parquet"
    digest = write_rows(path, ROWS)
    assert read_rows(path) == ROWS
    assert digest == digest_json(ROWS)
    assert [item.name for item in path.parent.iterdir()] == ["rows.parquet"]


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    digests = [write_rows(tmp_path / name, ROWS) for name in ("a.parquet", "b.parquet")]
    assert digests[0] == digests[1] != write_rows(tmp_path / "a.parquet", ROWS[::-1])


def test_a_file_that_is_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, ROWS)
    write_rows(path, ROWS[:1])
    assert read_rows(path) == ROWS[:1]
    write_rows(path, [])
    assert read_rows(path) == []


@pytest.mark.parametrize(
    "rows",
    [
        [{"value": 1}, {"value": "one"}],
        [{"value": object()}],
        [{"value": float("nan")}],
        [{"value": 2**70}],
        [{"value": dt.date(2026, 1, 1)}],
        [{"value": 1}, {"value": 2, "more": 3}],
        [{"value": 1, "more": 3}, {"value": 2}],
        [{1: "a key that is no text"}],
    ],
    ids=["mixed", "object", "nan", "huge", "date", "one-more", "one-less", "key"],
)
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(StorageError) as error:
        write_rows(path, rows)
    _one_line(error, path)
    assert list(tmp_path.iterdir()) == []
    write_rows(path, ROWS)
    with pytest.raises(StorageError):
        write_rows(path, rows)
    assert [item.name for item in tmp_path.iterdir()] == ["rows.parquet"]
    assert read_rows(path) == ROWS


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "rows.parquet"
    with pytest.raises(StorageError) as error:
        write_rows(path, ROWS)
    _one_line(error, path)
    folder = tmp_path / "folder.parquet"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(StorageError) as error:
        write_rows(folder, ROWS)
    _one_line(error, folder)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "folder.parquet"]


def test_a_missing_file_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(StorageError, match="run the same command again") as error:
        read_rows(path)
    _one_line(error, path)


@pytest.mark.parametrize("content", [b"", b"no table", b"PAR1" * 8])
def test_a_file_of_something_else_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(StorageError, match="cannot read") as error:
        read_rows(path)
    _one_line(error, path)


def test_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, ROWS)
    sound = path.read_bytes()
    damaged = [sound[:-cut] for cut in range(1, len(sound), 97)]
    for place in range(0, len(sound), 5):
        content = bytearray(sound)
        content[place] ^= 0x5A
        damaged.append(bytes(content))
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            assert read_rows(path) == ROWS  # not every byte of Parquet's own matters
        except StorageError as error:
            refused += 1
            assert "\n" not in str(error)
            assert str(path) in str(error)
    assert refused > len(damaged) // 2
