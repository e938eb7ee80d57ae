from __future__ import annotations

import datetime as dt
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.home import Home
from storage.tables.schemas import TABLES
from storage.tables.views import MACROS, VIEWS
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
    assert {row["name"] for row in catalog.sql("SHOW TABLES").to_pylist()} == {*TABLES, *VIEWS, "views"}
    for name, schema in TABLES.items():
        answer = catalog.sql(f"SELECT * FROM {name}")
        assert (answer.num_rows, answer.column_names) == (0, schema.names)


def test_views_answer_from_the_newest_and_say_what_they_are(filled: Catalog) -> None:
    described = {row["name"]: row["description"] for row in filled.sql("FROM views").to_pylist()}
    assert set(described) == {*VIEWS, *MACROS}
    for name in VIEWS:
        filled.sql(f"SELECT * FROM {name}")
    arguments = {"stage": "evaluate", "parameters": {}, "inputs": {}, "code_fingerprint": "f" * 64}
    with filled.record_run(stage_key="again", **arguments) as run:
        newer = curve_row(run.output("curve", artifact("curve", "d")), 64, 0.5, method="kvp")
        run.append("curves", [{**newer, "evaluation_id": "evaluation-newer"}])
    newest = filled.sql("SELECT method, budget, value FROM latest_curves ORDER BY method, budget").to_pylist()
    assert newest == [
        {"method": "h2o", "budget": 64, "value": 1.28},
        {"method": "h2o", "budget": 128, "value": 2.56},
        {"method": "kvp", "budget": 64, "value": 0.5},
    ]
    assert filled.sql("SELECT stage, runs FROM run_costs").to_pylist() == [{"stage": "evaluate", "runs": 2}]


def test_lineage_in_sql_is_the_graphs(filled: Catalog) -> None:
    curve = filled.sql("SELECT DISTINCT curve_id FROM curves").to_pylist()[0]["curve_id"]
    up = {row["artifact_id"] for row in filled.sql(f"FROM lineage_up('{curve}')").to_pylist()}
    assert up == {name for name in filled.lineage(curve).nodes if not name.startswith("run-")}
    environment = next(name for name in up if name.startswith("environment-"))
    down = {row["artifact_id"] for row in filled.sql(f"FROM lineage_down('{environment}')").to_pylist()}
    assert down == {environment, curve}


def test_the_catalog_is_as_it_was_at_a_version_or_time(filled: Catalog) -> None:
    early, moment = filled.version(), dt.datetime.now(dt.UTC)
    with filled.record_run(stage="train", stage_key="t", parameters={}, inputs={}, code_fingerprint="f" * 64) as run:
        run.output("policy", artifact("policy_set", "p"))
    counts = "SELECT (SELECT count(*) FROM runs) AS runs, (SELECT count(*) FROM artifacts) AS artifacts"
    assert filled.sql(counts).to_pylist() == [{"runs": 2, "artifacts": 4}]
    before = [{"runs": 1, "artifacts": 3}]
    tokyo = dt.timezone(dt.timedelta(hours=9))
    for at in (early, moment, moment.replace(tzinfo=None), moment.astimezone(tokyo)):
        assert filled.sql(counts, at=at).to_pylist() == before
    for at in (0, dt.datetime(2020, 1, 1)):
        assert filled.sql(counts, at=at).to_pylist() == [{"runs": 0, "artifacts": 0}]
    for at in (-1, 999):
        with pytest.raises(StorageError, match=f"no version {at} of the catalog: it has 0 to {filled.version()}"):
            filled.sql(counts, at=at)


def test_columns_of_one_name_keep_their_values(filled: Catalog) -> None:
    query = "SELECT a.budget, b.budget, 7 AS budget_1 FROM curves a JOIN curves b ON a.budget < b.budget LIMIT 1"
    assert filled.sql(query).to_pylist() == [{"budget": 64, "budget_1": 128, "budget_1_1": 7}]


def test_a_query_that_is_no_text_is_one_line(filled: Catalog) -> None:
    with pytest.raises(StorageError, match="not UTF-8"):
        filled.sql("SELECT '\udcff'")


def test_a_table_that_something_else_replaced_is_damage_and_not_empty(filled: Catalog, home: Home) -> None:
    shutil.rmtree(home.catalog / "runs.lance")
    (home.catalog / "runs.lance").write_text("not a table")
    with pytest.raises(StorageError, match=r"table runs at .* cannot be opened"):
        filled.sql("SELECT 1")


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
        "SELECT * FROM read_blob('{place}/secret.csv')",
        "SELECT * FROM read_json('{place}/secret.csv')",
        "SELECT * FROM sniff_csv('{place}/secret.csv')",
        "SELECT * FROM parquet_metadata('{place}/secret.csv')",
        "SELECT * FROM duckdb_extensions()",
        "SELECT getenv('HOME')",
        "SELECT * FROM enable_logging()",
        "SELECT * FROM query('COPY curves TO ''{place}/out.csv''')",
        "EXPLAIN ANALYZE COPY curves TO '{place}/out.csv'",
        "WITH new AS (INSERT INTO runs SELECT * FROM runs RETURNING *) SELECT * FROM new",
        "IMPORT DATABASE '{place}'",
        "UPDATE EXTENSIONS",
        "CREATE SECRET mine (TYPE S3)",
        "CREATE MACRO mine() AS 1",
        "SET VARIABLE mine = 1",
        "USE memory",
        "PREPARE mine AS SELECT 1",
        "BEGIN",
        "CHECKPOINT",
        "SELECT ?",
        "SELECT * FROM range(100_000_000_000)",
        "SELECT * FROM lineage_up('x'; DROP VIEW curves; --')",
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


def test_what_does_not_fit_into_memory_leaves_no_files(filled: Catalog) -> None:
    assert filled.sql("SELECT current_setting('temp_directory') AS place").to_pylist() == [{"place": ""}]


def test_quotes_in_an_id_are_part_of_it(filled: Catalog) -> None:
    for name in ("it''s", 'a"b', "'' OR ''1''=''1"):
        assert filled.sql(f"FROM lineage_up('{name}')").num_rows == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1, 0.5, 0.8, 1.1])
def test_a_slow_query_can_be_interrupted(filled: Catalog, home: Home, delay_s: float) -> None:
    code = (
        "import sys; from storage.home import Home; from storage.catalog.catalog import Catalog;"
        "catalog = Catalog(Home.open(sys.argv[1], create=False)); print(catalog.sql('SELECT 1').num_rows, flush=True);"
        "catalog.sql('SELECT sum(a.range * b.range) FROM range(100000000) a, range(100000000) b')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(home.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        time.sleep(delay_s)  # it would run for hours
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()  # a query that no interrupt reached would run for hours
    assert said.splitlines()[-1] == "KeyboardInterrupt"


def test_the_newest_is_what_was_recorded_last_even_if_a_clock_went_back(filled: Catalog) -> None:
    (first,) = filled.rows("runs")
    (curve,) = filled.rows("curves", "method = 'kvp' AND budget = 64")
    early = {"started_at": dt.datetime(2020, 1, 1), "ended_at": dt.datetime(2020, 1, 1)}
    filled.append("runs", [{**first, **early, "run_id": "run-later"}])
    filled.append("curves", [{**curve, "run_id": "run-later", "evaluation_id": "evaluation-later", "value": 7.0}])
    newest = filled.sql("SELECT DISTINCT evaluation_id, method FROM latest_curves ORDER BY method").to_pylist()
    assert newest == [
        {"evaluation_id": "evaluation-1", "method": "h2o"},
        {"evaluation_id": "evaluation-later", "method": "kvp"},
    ]


def test_an_unknown_table_is_answered_with_the_known_ones(catalog: Catalog) -> None:
    with pytest.raises(StorageError, match=r"nowhere.*the tables are artifacts, runs, edges"):
        catalog.sql("SELECT * FROM nowhere")


def test_a_process_that_asks_is_quick(filled: Catalog, home: Home) -> None:
    code = (
        "import sys; from storage.home import Home; from storage.catalog.catalog import Catalog;"
        "print(Catalog(Home.open(sys.argv[1], create=False)).sql('SELECT count(*) AS n FROM curves').to_pylist())"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, str(home.path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[{'n': 4}]\n"
    assert done.stderr == ""
    assert time.perf_counter() - started < 10  # 0.6 s on an idle machine
