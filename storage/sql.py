"""SQL over the catalog's tables in DuckDB, shut in: no writes, no files, no network, no settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from storage.errors import StorageError
from storage.tables import Table, one_line

if TYPE_CHECKING:
    import pyarrow as pa

_SHUT = (
    "SET TimeZone = 'UTC'",
    "SET enable_external_access = false",
    "SET python_enable_replacements = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET lock_configuration = true",
)
_UNIQUE = {"artifacts": "artifact_id", "models": "model_id"}


def query_tables(tables: Mapping[str, Table], query: str) -> pa.Table:
    """Answer one query; see `storage.catalog.Catalog.sql`.

    Raises:
        StorageError: if the query is wrong or not allowed.
    """
    import duckdb

    with duckdb.connect(":memory:") as connection:
        _require_read_only(connection, query)
        for name, table in tables.items():
            content = table.dataset()
            connection.register(_raw(name), table.schema.empty_table() if content is None else content)
        for name, table in tables.items():
            connection.execute(f"CREATE VIEW {name} AS {_definition(name, table)}")
        for setting in _SHUT:
            connection.execute(setting)
        try:
            return connection.execute(query).to_arrow_table()
        except duckdb.Error as error:
            hint = f"; the tables are {', '.join(tables)}" if "Table with name" in str(error) else ""
            raise StorageError(f"SQL: {one_line(error)}{hint}") from error


def _require_read_only(connection: object, query: str) -> None:
    import duckdb

    assert isinstance(connection, duckdb.DuckDBPyConnection)
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


def _raw(name: str) -> str:
    return f"_{name}_rows"


def _definition(name: str, table: Table) -> str:
    rows = _raw(name)
    if name in _UNIQUE:  # two processes may have registered the same thing at once: the first counts
        key = _UNIQUE[name]
        return f"SELECT DISTINCT ON ({key}) * FROM {rows} ORDER BY {key}, created_at"
    runs = _raw("runs")
    completed = f"run_id IN (SELECT run_id FROM {runs} WHERE outcome = 'completed')"
    if name == "edges":  # a failed run has read its inputs, but made nothing
        return f"SELECT DISTINCT * FROM {rows} WHERE {completed} OR role = 'input' AND run_id IN (SELECT run_id FROM {runs})"
    if "run_id" in table.schema.names and name != "runs":
        return f"SELECT * FROM {rows} WHERE {completed}"
    return f"SELECT * FROM {rows}"
