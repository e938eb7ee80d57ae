"""SQL over the catalog's tables in DuckDB, shut in: no writes, no files, no network, no settings.

A row in `runs` is what publishes everything that a run wrote, so the version of that one table is the version of the
catalog: an earlier one shows the runs that it has, and what they made.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from kvpolicy.errors import first_line
from storage.errors import StorageError
from storage.lineage.graph import MADE
from storage.tables.lance_table import Table, quote
from storage.tables.schemas import UNIQUE
from storage.tables.views import MACROS, PLACED, VIEWS, View

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_SHUT = (
    "SET TimeZone = 'UTC'",
    "SET temp_directory = ''",  # or what does not fit into memory would go to a folder where the process runs
    "SET enable_external_access = false",
    "SET python_enable_replacements = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET lock_configuration = true",
)
_MOST_ROWS = 20_000_000
_FEW_RUNS = 500
_COMPLETED = "run_id IN (SELECT run_id FROM runs WHERE outcome = 'completed')"


def query_tables(tables: Mapping[str, Table], query: str, *, version: int | None = None) -> pa.Table:
    """Answer one query; see `storage.catalog.catalog.Catalog.sql`.

    Args:
        tables: the catalog's tables.
        query: one query.
        version: version of the table `runs`; the latest by default.

    Raises:
        StorageError: if the query is wrong or not allowed.
    """
    import duckdb

    # DuckDB (1.5) may work for hours before it looks for a signal, and makes errors of its own of those that reach it
    # elsewhere; in a thread of its own it can be told, and meets none.
    with duckdb.connect(":memory:") as connection, ThreadPoolExecutor(max_workers=1) as pool:
        answer = pool.submit(_answer, connection, tables, query, version)
        try:
            return answer.result()
        except KeyboardInterrupt:
            while not answer.done():  # told before the query has begun, it would not know
                connection.interrupt()
                wait([answer], timeout=0.05)
            raise


def _answer(
    connection: duckdb.DuckDBPyConnection, tables: Mapping[str, Table], query: str, version: int | None
) -> pa.Table:
    import duckdb

    _require_read_only(connection, query)
    # The other views refer to `runs`, and some, of an earlier version, to `edges`.
    for name in sorted(tables, key=lambda name: (name != "runs", name != "edges")):
        _create_view(connection, name, tables[name], version)
    _create_order_of_runs(connection, tables["runs"], version)
    try:
        _create_ready_made(connection, query)
        for setting in _SHUT:
            connection.execute(setting)
        # As a query within a query it also has columns of different names: `name` and `name_1`.
        answer = connection.sql(query).limit(_MOST_ROWS + 1).to_arrow_table()
    except duckdb.Error as error:
        hint = f"; the tables are {', '.join([*tables, *VIEWS])}" if "Table with name" in str(error) else ""
        raise StorageError(f"SQL: {first_line(error)}{hint}") from error
    if answer.num_rows > _MOST_ROWS:
        raise StorageError(f"SQL: the answer has more than {_MOST_ROWS:,} rows: add conditions, a LIMIT or a GROUP BY")
    return answer


def _require_read_only(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    import duckdb

    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise StorageError("SQL: the query is not UTF-8 text") from error
    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise StorageError(f"SQL: {first_line(error)}") from error
    if len(statements) != 1:
        raise StorageError(f"SQL: {len(statements)} statements, expected one query")
    # PIVOT is a MULTI statement; nothing that it expands to can leave the memory of this connection.
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.MULTI)
    try:
        kind = statements[0].type
    except ValueError:  # a kind that DuckDB's Python side does not know, such as UPDATE EXTENSIONS
        kind = None
    if kind not in allowed:
        name = str(kind).rpartition(".")[2] if kind else "this kind of statement"
        raise StorageError(f"SQL: {name} is refused, the catalog can only be read; expected a SELECT")


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, table: Table, version: int | None) -> None:
    content = None if version == 0 else table.dataset(version if name == "runs" else None)
    # A view of a relation, not of a registered name: SHOW TABLES then lists the catalog's tables and nothing else.
    rows = connection.from_arrow(table.schema.empty_table() if content is None else content)
    columns = table.schema.names
    if name in UNIQUE:  # two processes may have registered the same thing at once: the first counts
        key = UNIQUE[name]
        firsts = ", ".join(
            column if column == key else f"arg_min({column}, created_at) AS {column}" for column in columns
        )
        rows = rows.aggregate(firsts, key)
        if version is not None:
            rows = rows.filter(f"{key} IN (SELECT artifact_id FROM edges)")
    elif name == "edges":  # a failed run has read its inputs, but made nothing
        rows = rows.filter(
            f"run_id IN (SELECT run_id FROM runs WHERE outcome IN {MADE}) "
            "OR role = 'input' AND run_id IN (SELECT run_id FROM runs)"
        ).distinct()
    elif "run_id" in columns and name != "runs":
        rows = rows.filter(_COMPLETED)
    rows.create_view(name)


def _create_order_of_runs(connection: duckdb.DuckDBPyConnection, runs: Table, version: int | None) -> None:
    placed = connection.from_arrow(runs.reader(["run_id"], version)).project("run_id, _rowid AS place")
    schema, _, name = PLACED.partition(".")
    # In a schema of its own, it is no table of the catalog that SHOW TABLES would list.
    connection.execute(f"CREATE SCHEMA {schema}; USE {schema}")
    placed.create_view(name)
    connection.execute("USE main")


def _create_ready_made(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    import pyarrow as pa

    described = {**VIEWS, **MACROS}
    names = pa.table({"name": list(described), "description": [view.description for view in described.values()]})
    connection.from_arrow(names).create_view("views")
    for name, view in VIEWS.items():
        narrowed = _narrowed(connection, view) if name in query.lower() else view.query
        connection.execute(f"CREATE VIEW {name} AS {narrowed}")
    for name, view in MACROS.items():
        connection.execute(f"CREATE MACRO {name} AS TABLE {view.query}")


def _narrowed(connection: duckdb.DuckDBPyConnection, view: View) -> str:
    """Name the runs that a view shows: Lance can look them up, but DuckDB does not tell it what a join has found."""
    if not view.runs:
        return view.query
    runs = connection.sql(view.runs).to_arrow_table()["run_id"].to_pylist()
    if not 0 < len(runs) <= _FEW_RUNS:
        return view.query
    narrowed_curves = f"(FROM curves WHERE run_id IN ({', '.join(map(quote, runs))})) curves"
    return view.query.replace("FROM curves", f"FROM {narrowed_curves}")
