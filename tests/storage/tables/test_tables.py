from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from kvpolicy.errors import first_line
from storage.errors import StorageError
from storage.tables.lance_table import Table

SCHEMA = pa.schema([pa.field("name", pa.string(), nullable=False), pa.field("number", pa.int64())])


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(name="things", uri=str(tmp_path / "things.lance"), schema=SCHEMA)


def test_a_new_table_is_empty(table: Table) -> None:
    assert table.version() == 0
    assert table.scan().to_pylist() == []
    table.append([])
    assert table.dataset() is None


def test_rows_come_back_in_the_order_of_commits(table: Table) -> None:
    for number in (3, 1, 2):
        table.append([{"name": "it's", "number": number}, {"name": "other"}])
    assert table.scan("name = 'it''s'", ["number"])["number"].to_pylist() == [3, 1, 2]
    assert table.scan("number IS NULL").num_rows == 3
    assert table.scan(version=2).num_rows == 2  # the first version is the empty table
    assert [row["number"] for row in table.scan_in("name", ["it's", "none"], "number > 1")] == [3, 2]
    assert table.scan_in("name", []) == []


def test_writers_of_a_new_table_all_succeed(table: Table) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: table.append([{"name": "n", "number": number}]), range(24)))
    assert sorted(table.scan()["number"].to_pylist()) == list(range(24))


def commit_at(table: Table, moment: dt.datetime, number: int) -> None:
    """Append a row on a machine whose clock says so: the version's file is told so afterwards."""
    table.append([{"name": "n", "number": number}])
    dataset = table.dataset()
    assert dataset is not None
    path = Path(table.uri) / "_versions" / f"{2**64 - 1 - dataset.version:020d}.manifest"
    seconds = [int(time.timestamp()) for time in (dataset.get_version()["timestamp"], moment)]
    now, then = (b"\x08" + encode_varint(value) for value in seconds)
    content = path.read_bytes()
    assert content.count(now) == 1 and len(now) == len(then)
    path.write_bytes(content.replace(now, then))


def encode_varint(value: int) -> bytes:
    """As protocol buffers have it: seven bits a byte, the lowest first."""
    parts = [value >> shift & 127 for shift in range(0, value.bit_length(), 7)]
    return bytes(part | 128 for part in parts[:-1]) + bytes(parts[-1:])


def after_creation(table: Table) -> dt.datetime:
    table.create()
    return dt.datetime.now(dt.UTC) + dt.timedelta(days=1)


def version_by_walking(table: Table, moment: dt.datetime) -> int:
    dataset = table.dataset()
    assert dataset is not None
    known = [(entry["timestamp"].astimezone(), entry["version"]) for entry in dataset.versions()]
    return max((version for time, version in known if time <= moment), default=0)


def test_versions_are_found_by_time(table: Table) -> None:
    start = after_creation(table)
    for hour in range(9):
        commit_at(table, start + dt.timedelta(hours=hour), hour)
    for half_hours in range(-1, 20):
        moment = start + dt.timedelta(minutes=30 * half_hours + 1)
        found = table.version_at(moment)
        assert found == table.version_at(moment.replace(tzinfo=None))
        assert table.scan(version=found).num_rows == min(max(half_hours // 2 + 1, 0), 9)
    assert table.version_at(dt.datetime(2020, 1, 1)) == 0


def test_a_clock_that_jumps_back_makes_no_later_time_an_earlier_version(table: Table) -> None:
    start = after_creation(table)
    hours = [0, 1, 2, 10, 11, 3, 4, 5, 2, 6]  # it was set back twice
    for number, hour in enumerate(hours):
        commit_at(table, start + dt.timedelta(hours=hour), number)
    moments = [start + dt.timedelta(minutes=30 * half_hours + 1) for half_hours in range(26)]
    found = [table.version_at(moment) for moment in moments]
    assert found == sorted(found)
    assert all(version <= version_by_walking(table, moment) for version, moment in zip(found, moments, strict=True))
    # From the time of the latest commit on it is the latest, whatever other versions say of themselves.
    assert found[12:] == [table.version()] * 14
    assert table.scan(version=found[-1])["number"].to_pylist() == list(range(10))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"name": "n", "colour": 1}, "row 0: unknown columns colour; it has name, number"),
        ({"number": 1}, "row 0: no value for name"),
        ({"name": "n", "number": "many"}, "a value does not fit"),
    ],
)
def test_rows_that_do_not_fit_are_one_line(table: Table, row: dict[str, object], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        table.append([row])
    assert table.dataset() is None


def test_errors_name_the_table_and_no_foreign_source(table: Table, tmp_path: Path) -> None:
    table.append([{"name": "n"}])
    for attempt in (lambda: table.scan("colour = 1"), lambda: table.scan(version=9)):
        with pytest.raises(StorageError, match="table things at ") as caught:
            attempt()
        assert "\n" not in str(caught.value) and ".rs:" not in str(caught.value)
    (tmp_path / "blocked").write_text("")
    with pytest.raises(StorageError, match="table t at "):
        Table(name="t", uri=str(tmp_path / "blocked"), schema=SCHEMA).append([{"name": "n"}])


def test_a_damaged_table_and_something_in_its_place_say_what_to_do(table: Table, tmp_path: Path) -> None:
    table.append([{"name": "n"}])
    for part in Path(table.uri).glob("data/*.lance"):
        part.write_bytes(part.read_bytes()[:20])
    with pytest.raises(
        StorageError, match=r"table things at .* cannot be read: .*; restore it from a copy, or use ano"
    ):
        table.scan()
    for part in Path(table.uri).glob("_versions/*"):
        part.write_bytes(part.read_bytes()[:5])
    (tmp_path / "file").write_text("")
    below = Table(name="things", uri=str(tmp_path / "file" / "things.lance"), schema=SCHEMA)
    for damaged in (table, below):
        with pytest.raises(
            StorageError, match=r"table things at .* cannot be opened: .*; restore it from a copy, or u"
        ):
            damaged.scan()


def test_one_line() -> None:
    assert first_line(ValueError("first\nsecond")) == "first"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(OSError("Not found: a, /home/r/lance/src/x.rs:65:26")) == "Not found: a"
