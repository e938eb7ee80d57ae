from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from storage.errors import StorageError, one_line
from storage.tables import Table

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


def test_one_line() -> None:
    assert one_line(ValueError("first\nsecond")) == "first"
    assert one_line(KeyError()) == "KeyError"
    assert one_line(OSError("Not found: a, /home/r/lance/src/x.rs:65:26")) == "Not found: a"
