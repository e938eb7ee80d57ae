from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.catalog import Catalog
from storage.errors import StorageError
from storage.home import Home
from storage.schemas import TABLES
from tests.storage.conftest import artifact, curve_row


@pytest.fixture
def filled(catalog: Catalog) -> Catalog:
    with catalog.record_run(
        stage="evaluate", stage_key="k", parameters={}, inputs={}, code_fingerprint="f" * 64
    ) as run:
        curve_id = run.output("curve", artifact("curve", "c"))
        run.append("curves", [curve_row(curve_id, budget, budget / 100, method="kvp") for budget in (64, 128)])
        run.append("curves", [curve_row(curve_id, budget, budget / 50, method="h2o") for budget in (64, 128)])
    return catalog


def test_a_new_catalog_has_all_tables_empty(catalog: Catalog) -> None:
    assert {row["name"] for row in catalog.sql("SHOW TABLES").to_pylist()} == set(TABLES)
    for name, schema in TABLES.items():
        answer = catalog.sql(f"SELECT * FROM {name}")
        assert (answer.num_rows, answer.column_names) == (0, schema.names)


def test_questions_are_answered(filled: Catalog) -> None:
    best = filled.sql("SELECT budget, arg_min(method, value) AS method FROM curves GROUP BY budget ORDER BY budget")
    assert best.to_pylist() == [{"budget": 64, "method": "kvp"}, {"budget": 128, "method": "kvp"}]
    joined = "SELECT r.stage FROM runs r JOIN curves c USING (run_id) WHERE c.method = 'h2o' AND c.budget = 64"
    assert filled.sql(joined).to_pylist() == [{"stage": "evaluate"}]
    pivoted = filled.sql(
        "PIVOT (SELECT method, budget, value FROM curves) ON budget USING first(value) ORDER BY method"
    )
    assert pivoted.to_pylist() == [
        {"method": "h2o", "64": 1.28, "128": 2.56},
        {"method": "kvp", "64": 0.64, "128": 1.28},
    ]
    assert filled.sql("SELECT count(*) AS n FROM runs WHERE now() - started_at < INTERVAL 1 HOUR").to_pylist() == [
        {"n": 1}
    ]
    assert filled.sql("FROM edges").num_rows == 3


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO runs SELECT * FROM runs",
        "DELETE FROM curves",
        "UPDATE curves SET value = 0",
        "DROP VIEW curves",
        "CREATE TABLE mine AS SELECT 1",
        "COPY curves TO '{place}/out.csv'",
        "EXPORT DATABASE '{place}/out'",
        "ATTACH '{place}/out.db'",
        "INSTALL httpfs",
        "LOAD json",
        "SET enable_external_access = true",
        "PRAGMA database_list",
        "CALL pragma_version()",
        "SELECT * FROM read_csv('{place}/secret.csv')",
        "SELECT * FROM '{place}/secret.csv'",
        "SELECT * FROM glob('{place}/*')",
        "SELECT * FROM read_text('{place}/secret.csv')",
        "SELECT * FROM read_csv('http://127.0.0.1:9/x.csv')",
        "SELECT * FROM filled",  # a Python variable of the caller
        "SELECT 1; DROP VIEW curves",
        "SELEC 1",
        "SELECT nothing FROM curves",
        "SELECT * FROM nowhere",
        "SELECT 1/0::JUNK",
        "",
        "-- only a comment",
    ],
)
def test_wrong_and_forbidden_queries_are_one_line_and_change_nothing(
    filled: Catalog, tmp_path: Path, query: str
) -> None:
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=r"^SQL: ") as caught:
        filled.sql(query.format(place=tmp_path))
    assert "\n" not in str(caught.value)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert filled.sql("SELECT count(*) AS n FROM curves").to_pylist() == [{"n": 4}]


def test_an_unknown_table_is_answered_with_the_known_ones(catalog: Catalog) -> None:
    with pytest.raises(StorageError, match=r"nowhere.*the tables are artifacts, runs, edges"):
        catalog.sql("SELECT * FROM nowhere")


def test_a_process_that_asks_is_quick(filled: Catalog, home: Home) -> None:
    code = (
        "import sys; from storage.home import Home; from storage.catalog import Catalog;"
        "print(Catalog(Home.open(sys.argv[1], create=False)).sql('SELECT count(*) AS n FROM curves').to_pylist())"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, str(home.path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[{'n': 4}]\n"
    assert done.stderr == ""
    assert time.perf_counter() - started < 10  # 0.6 s on an idle machine
