"""SQL over the catalog's tables in DuckDB, shut in: no writes, no files, no network, no settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from storage.errors import StorageError
from storage.tables import Table, one_line

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

_SHUT = (
    "SET TimeZone = 'UTC'",
    "SET enable_external_access = false",
    "SET python_enable_replacements = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET lock_configuration = true",
)
_COMPLETED = "run_id IN (SELECT run_id FROM runs WHERE outcome = 'completed')"
_UNIQUE = {"artifacts": "artifact_id", "models": "model_id"}


def query_tables(tables: Mapping[str, Table], query: str) -> pa.Table:
    """Answer one query; see `storage.catalog.Catalog.sql`.

    Raises:
        StorageError: if the query is wrong or not allowed.
    """
    import duckdb

    with duckdb.connect(":memory:") as connection:
        _require_read_only(connection, query)
        for name in sorted(tables, key=lambda name: name != "runs"):  # the other views refer to it
            _create_view(connection, name, tables[name])
        for setting in _SHUT:
            connection.execute(setting)
        try:
            answer: pa.Table = connection.sql(query).to_arrow_table()
            return answer
        except duckdb.Error as error:
            hint = f"; the tables are {', '.join(tables)}" if "Table with name" in str(error) else ""
            raise StorageError(f"SQL: {one_line(error)}{hint}") from error


def _require_read_only(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    import duckdb

    try:
        statements = connection.extract_statements(query)
    except duckdb.Error as error:
        raise StorageError(f"SQL: {one_line(error)}") from error
    if len(statements) != 1:
        raise StorageError(f"SQL: {len(statements)} statements, expected one query")
    # PIVOT is a MULTI statement; nothing that it expands to can leave the memory of this connection.
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.MULTI)
    if statements[0].type not in allowed:
        kind = str(statements[0].type).rpartition(".")[2]
        raise StorageError(f"SQL: {kind} is refused, the catalog can only be read; expected a SELECT")


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, table: Table) -> None:
    content = table.dataset()
    # A view of a relation, not of a registered name: SHOW TABLES then lists the catalog's tables and nothing else.
    rows = connection.from_arrow(table.schema.empty_table() if content is None else content)
    columns = table.schema.names
    if name in _UNIQUE:  # two processes may have registered the same thing at once: the first counts
        key = _UNIQUE[name]
        firsts = ", ".join(
            column if column == key else f"arg_min({column}, created_at) AS {column}" for column in columns
        )
        rows = rows.aggregate(firsts, key)
    elif name == "edges":  # a failed run has read its inputs, but made nothing
        rows = rows.filter(f"{_COMPLETED} OR role = 'input' AND run_id IN (SELECT run_id FROM runs)").distinct()
    elif "run_id" in columns and name != "runs":
        rows = rows.filter(_COMPLETED)
    rows.create_view(name)
