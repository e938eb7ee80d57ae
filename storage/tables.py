"""One append-only Lance table: creation on first use, appends that survive concurrent writers, filtered reads.

Shared by the manifest of the trace store and by the catalog. It knows no table's meaning.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa

from storage.errors import StorageError

_ATTEMPTS = 8
_IN_LIST = 500
_RUST_PLACE = re.compile(r",? \S+\.rs:\d+(:\d+)?")  # Lance and zarrs end messages with places in their own sources
_LANCE_ERRORS = (OSError, ValueError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A Lance table at a place.

    Attributes:
        name: name for messages.
        uri: folder of the table.
        schema: its columns.
    """

    name: str
    uri: str
    schema: pa.Schema

    def dataset(self, version: int | None = None) -> Any | None:
        """Open the table, or return None if nothing was ever appended.

        Raises:
            StorageError: if the table is damaged or has no such version.
        """
        if not Path(self.uri).exists():
            return None
        try:
            return _lance().dataset(self.uri, version=version)
        except _LANCE_ERRORS as error:
            which = "" if version is None else f" at version {version}"
            raise self._error(f"cannot be opened{which}", error) from error

    def version(self) -> int:
        """Return the latest version; 0 if nothing was ever appended."""
        dataset = self.dataset()
        return 0 if dataset is None else int(dataset.version)

    def version_at(self, time: dt.datetime) -> int:
        """Return the version that was the latest at a time; 0 if there was none. A naive time is in UTC."""
        dataset = self.dataset()
        moment = time.replace(tzinfo=dt.UTC) if time.tzinfo is None else time
        known = [] if dataset is None else dataset.versions()  # their times are naive and local
        return max((entry["version"] for entry in known if entry["timestamp"].astimezone() <= moment), default=0)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows in one commit; concurrent appends all succeed, in some order.

        Raises:
            StorageError: if a row does not fit the schema or the table cannot be written.
        """
        if rows:
            self._commit(to_arrow(self.name, rows, self.schema))

    def _commit(self, content: pa.Table) -> None:
        dataset = self.dataset() or self._create()
        for attempt in range(_ATTEMPTS):
            try:
                dataset.insert(content, mode="append")
                return
            except _LANCE_ERRORS as error:
                # Lance rebases appends itself; only when it gave up is there a conflict left.
                if attempt == _ATTEMPTS - 1 or "conflict" not in str(error).lower():
                    raise self._error("cannot be written", error) from error
            time.sleep(random.uniform(0, 0.02 * 2**attempt))
            dataset = self.dataset()

    def _create(self) -> Any:
        """Make the table empty, elsewhere, and move it into place; whoever comes second finds it there.

        Creating it in place would not do: of two Lance writers that create one table at once, the second replaces the
        rows of the first, and both report success (github.com/lance-format/lance/issues/4451).
        """
        place, draft = Path(self.uri), f"{self.uri}.tmp-{uuid.uuid4().hex}"
        try:
            _lance().write_dataset(self.schema.empty_table(), draft, mode="create")
            Path(draft).rename(place)  # fails if a folder with content is there
        except _LANCE_ERRORS as error:
            shutil.rmtree(draft, ignore_errors=True)
            if not place.is_dir():
                raise self._error("cannot be made", error) from error
        return self.dataset()

    def compact(self) -> tuple[int, int]:
        """Merge the small files that many appends leave; returns how many there were and are.

        Rows and their order stay, and so do earlier versions.

        Raises:
            StorageError: if the table cannot be written.
        """
        dataset = self.dataset()
        if dataset is None:
            return 0, 0
        before = len(dataset.get_fragments())
        try:
            dataset.optimize.compact_files()
        except _LANCE_ERRORS as error:
            raise self._error("cannot be compacted", error) from error
        return before, len(dataset.get_fragments())

    def scan(
        self, where: str | None = None, columns: Sequence[str] | None = None, version: int | None = None
    ) -> pa.Table:
        """Read the rows that satisfy a filter, in the order of their commits.

        Args:
            where: SQL condition on the columns.
            columns: columns to read; all by default.
            version: version to read; the latest by default.

        Raises:
            StorageError: if the filter is wrong or the table cannot be read.
        """
        names = list(columns) if columns is not None else self.schema.names
        dataset = self.dataset(version) if version != 0 else None
        if dataset is None:
            return pa.schema([self.schema.field(name) for name in names]).empty_table()
        try:
            return dataset.to_table(columns=names, filter=where)
        except _LANCE_ERRORS as error:
            raise self._error("cannot be read", error) from error

    def scan_in(self, column: str, values: Iterable[str], where: str = "true") -> list[dict[str, Any]]:
        """Read the rows whose ``column`` is one of ``values`` and that satisfy ``where``."""
        wanted = sorted(set(values))
        rows: list[dict[str, Any]] = []
        for start in range(0, len(wanted), _IN_LIST):
            names = ", ".join(quote(value) for value in wanted[start : start + _IN_LIST])
            rows.extend(self.scan(f"{column} IN ({names}) AND {where}").to_pylist())
        return rows

    def _error(self, what: str, error: Exception) -> StorageError:
        return StorageError(f"table {self.name} at {self.uri} {what}: {one_line(error)}")


def to_arrow(name: str, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Convert rows, and refuse what Arrow would silently drop or fill in.

    Raises:
        StorageError: if a column is unknown, a required one is missing, or a value has the wrong type.
    """
    known = set(schema.names)
    for index, row in enumerate(rows):
        if unknown := set(row) - known:
            names = ", ".join(sorted(unknown))
            raise StorageError(f"table {name}, row {index}: unknown columns {names}; it has {', '.join(schema.names)}")
        missing = [field.name for field in schema if not field.nullable and row.get(field.name) is None]
        if missing:
            raise StorageError(f"table {name}, row {index}: no value for {', '.join(missing)}")
    try:
        return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise StorageError(f"table {name}: a value does not fit its column: {one_line(error)}") from error


def quote(value: str) -> str:
    """Return a SQL text literal."""
    return "'" + value.replace("'", "''") + "'"


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return the first line of an error's message, shortened."""
    lines = _RUST_PLACE.sub("", str(error)).strip().splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:limit]


def _lance() -> ModuleType:
    os.environ.setdefault("LANCE_LOG", "error")  # Lance's Rust side logs to standard error
    import lance

    module: ModuleType = lance
    return module
