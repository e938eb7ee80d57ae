"""Tables stay quick by themselves, and nothing is lost on the way: whoever writes, merges, is killed or looks back."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.tables.compaction import num_settled
from storage.tables.lance_table import Table
from tests.storage.small_table import SCHEMA, table_at

MANY = 70_000  # so many rows are worth an index

APPENDING = """
import sys
from tests.storage.small_table import table_at

table, name = table_at(sys.argv[1]), sys.argv[2]
for number in range(int(sys.argv[3])):
    table.append([{"name": name, "number": number}])
"""

COMPACTING = """
import sys
from tests.storage.small_table import table_at

table = table_at(sys.argv[1])
print("ready", flush=True)
while True:
    table.compact()
"""

KILLED_BETWEEN_FILES_AND_INDEXES = """
import os, signal, sys
from storage.tables.lance_table import compaction
from tests.storage.small_table import table_at

compaction.bring_indexes_up = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
table_at(sys.argv[1]).compact()
"""


def rows(numbers: range) -> pa.Table:
    return pa.table([[f"n{number}" for number in numbers], list(numbers)], schema=SCHEMA)


def start(code: str, *args: object, stdout: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], stdout=stdout, text=True)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return table_at(tmp_path)


def num_files(table: Table) -> int:
    dataset = table.dataset()
    return 0 if dataset is None else len(dataset.get_fragments())


@given(st.lists(st.integers(1, 10**6), min_size=1))
def test_the_settled_files_are_those_larger_than_all_after_them(sizes: list[int]) -> None:
    settled = num_settled(sizes)
    assert all(sizes[index] > sum(sizes[index + 1 :]) for index in range(settled))
    assert settled == len(sizes) or sizes[settled] <= sum(sizes[settled + 1 :])
    assert settled <= sum(sizes).bit_length()  # so few files are left by merging, however many there were


@given(st.lists(st.integers(1, 50), min_size=1, max_size=400))
def test_a_row_is_written_again_seldom(appended: list[int]) -> None:
    """Merging after every append, which is more than happens, writes a row log2(rows) + 1 times at most."""
    files: list[list[int]] = []  # times that each row was written
    for count in appended:
        files.append([1] * count)
        settled = num_settled([len(file) for file in files])
        if len(files) - settled > 1:
            files[settled:] = [[times + 1 for file in files[settled:] for times in file]]
    assert max(times for file in files for times in file) <= sum(appended).bit_length() + 1


def test_appending_alone_keeps_the_files_few(table: Table) -> None:
    most = 0
    for number in range(300):
        table.append([{"name": f"n{number}", "number": number}])
        most = max(most, num_files(table))
    assert most < 100 and num_files(table) < 100
    assert table.scan(columns=["number"])["number"].to_pylist() == list(range(300))


def test_compacting_keeps_rows_order_and_every_version(table: Table) -> None:
    for number in range(20):
        table.append([{"name": f"n{number}", "number": number}])
    before, versions = table.scan(), table.version()
    assert table.compact() == (20, 1)
    assert table.compact() == (1, 1)
    assert table.scan().equals(before)
    for version in range(1, versions + 1):
        assert table.scan(version=version).equals(before.slice(0, version - 1))
    table.append([{"name": "after", "number": 20}])
    assert table.scan(columns=["number"])["number"].to_pylist() == list(range(21))


def test_an_empty_or_absent_table_is_compact(table: Table) -> None:
    assert table.compact() == (0, 0)
    table.create()
    assert table.compact() == (0, 0)


def test_rows_are_found_whether_an_index_has_them_or_not(table: Table) -> None:
    table.append_arrow(rows(range(MANY)))
    table.compact()
    dataset = table.dataset()
    assert dataset is not None
    assert [index.num_rows_indexed for index in dataset.describe_indices()] == [MANY]
    assert "ScalarIndexQuery" in dataset.scanner(filter="name = 'n7'").explain_plan()
    indexed = table.version()
    table.append_arrow(rows(range(MANY, MANY + 10)))
    table.append([{"name": "n7", "number": -1}])

    def found(name: str, version: int | None = None) -> list[int]:
        numbers: list[int] = table.scan(f"name = '{name}'", ["number"], version)["number"].to_pylist()
        return numbers

    for _ in range(2):  # before and after the new rows are in the index
        assert (found("n7"), found(f"n{MANY + 3}")) == ([7, -1], [MANY + 3])
        assert [row["number"] for row in table.scan_in("name", ["n7", f"n{MANY + 3}", "none"])] == [7, MANY + 3, -1]
        assert (found("n7", indexed), found(f"n{MANY + 3}", indexed)) == ([7], [])
        assert found("n7", 2) == [7]  # from before there was an index
        table.compact()


def test_many_values_are_looked_up_as_few_are(table: Table) -> None:
    table.append_arrow(rows(range(2_000)))
    table.append_arrow(rows(range(1_500, 2_500)))
    wanted = [f"n{number}" for number in range(1_000, 2_200)]
    found = table.scan_in("name", wanted, "number % 2 = 0", ["name", "number"])
    assert [row["number"] for row in found] == [*range(1_000, 2_000, 2), *range(1_500, 2_200, 2)]


def test_writers_and_compactors_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    table, each = table_at(tmp_path), 80
    table.append_arrow(rows(range(MANY)))  # so that indexes are made and brought up all the while
    writers = [start(APPENDING, tmp_path, name, each) for name in ("a", "b", "c")]
    compactors = [start(COMPACTING, tmp_path, stdout=subprocess.PIPE) for _ in range(2)]
    chance, killed = random.Random(0), 0
    while any(writer.poll() is None for writer in writers):
        for index, compactor in enumerate(compactors):
            assert compactor.stdout is not None and compactor.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0.01, 0.1))
            compactor.kill()  # wherever it is
            compactor.communicate()
            killed += compactor.returncode == -signal.SIGKILL
            compactors[index] = start(COMPACTING, tmp_path, stdout=subprocess.PIPE)
    for compactor in compactors:
        compactor.kill()
        compactor.communicate()
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert killed >= 1
    for _ in range(2):
        content = table.scan()
        for name in ("a", "b", "c"):
            for own in (content.filter(pc.equal(content["name"], name)), table.scan(f"name = '{name}'")):
                assert own["number"].to_pylist() == list(range(each))
        assert content.slice(0, MANY).equals(rows(range(MANY))) and content.num_rows == MANY + 3 * each
        table.compact()
    assert num_files(table) == 1


def test_a_table_whose_compactor_died_half_way_is_whole(table: Table, tmp_path: Path) -> None:
    table.append_arrow(rows(range(MANY)))
    table.append_arrow(rows(range(MANY, MANY + 5)))
    before = table.scan()
    done = subprocess.run([sys.executable, "-c", KILLED_BETWEEN_FILES_AND_INDEXES, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert num_files(table) == 1
    assert table.scan().equals(before)
    assert table.compact() == (1, 1)
    assert table.scan("name = 'n3'", ["number"])["number"].to_pylist() == [3]
