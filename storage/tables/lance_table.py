"""One append-only Lance table: creation on first use, appends that survive concurrent writers, filtered reads.

Shared by the manifest of the trace store and by the catalog. It knows no table's meaning.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import random
import re
import shutil
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvpolicy.errors import first_line
from storage.errors import StorageError, remedy_for
from storage.tables import compaction

_ATTEMPTS = 8
_IN_LIST = 500
_FILES_AT_MOST = 64
_PLACE = "_rowid"  # Lance's name for it
_LANCE_ERRORS = (OSError, ValueError, RuntimeError)
# What Lance and the system say of files that are cut, changed or lost, or of something else in their place.
_DAMAGED = re.compile(r"corrupt|LanceError\(IO\)|was not found: |Not a directory", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A Lance table at a place.

    Attributes:
        name: name for messages.
        uri: folder or URL of the table.
        schema: its columns.
        options: what Lance has to know to reach it.
        indexed: columns that rows are looked up by.
    """

    name: str
    uri: str
    schema: pa.Schema
    options: Mapping[str, str] = field(default_factory=dict)
    indexed: tuple[str, ...] = ()

    def dataset(self, version: int | None = None) -> Any | None:
        """Open the table, or return None if nothing was ever appended.

        Raises:
            StorageError: if the table is damaged or has no such version.
        """
        try:
            if "://" not in self.uri:
                Path(self.uri).stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error("cannot be opened", error) from error
        try:
            return _lance().dataset(self.uri, version=version, storage_options=dict(self.options))
        except _LANCE_ERRORS as error:
            which = "" if version is None else f" at version {version}"
            raise self._error(f"cannot be opened{which}", error) from error

    def version(self) -> int:
        """Return the latest version; 0 if nothing was ever appended."""
        dataset = self.dataset()
        return 0 if dataset is None else int(dataset.version)

    def version_at(self, time: dt.datetime) -> int:
        """Return the version that was the latest at a time; 0 if there was none. A naive time is in UTC.

        Versions are in the order of commits, so where a clock jumped back their times are not: of several answers this
        is one, never an earlier version for a later time, and the latest as soon as its own time has come.
        """
        dataset = self.dataset()
        moment = time.replace(tzinfo=dt.UTC) if time.tzinfo is None else time
        # Halving looks at a few versions; to ask all for their times takes seconds where there are thousands.
        known = [] if dataset is None else [ref["version"] for ref in dataset.version_refs()]
        place = 0 if not known or self._committed_at(dataset, known[-1]) > moment else len(known)
        if known and not place:
            place = bisect_right(known, moment, key=lambda version: self._committed_at(dataset, version))
        return known[place - 1] if place else 0

    def _committed_at(self, dataset: Any, version: int) -> dt.datetime:
        moment: dt.datetime = dataset.checkout_version(version).get_version()["timestamp"]  # naive and local
        return moment.astimezone()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows in one commit; concurrent appends all succeed, in some order.

        Raises:
            StorageError: if a row does not fit the schema or the table cannot be written.
        """
        if rows:
            self.append_arrow(to_arrow(self.name, rows, self.schema))

    def append_arrow(self, content: pa.Table) -> None:
        """Append a table of this schema in one commit, as `append` does with rows.

        Now and then this also merges what many appends have left.

        Raises:
            StorageError: if the table cannot be written.
        """
        dataset = self.dataset()
        if dataset is None:
            dataset = self._create()
        dataset = self._commit(dataset, lambda latest: latest.insert(content, mode="append"), "cannot be written")
        # Of many writers at once, the one whose commit makes it so many files does the work, and the others go on.
        if len(dataset.get_fragments()) % _FILES_AT_MOST == 0:
            # What is appended is there, whatever becomes of this; the next one to make it so many files tries again.
            with contextlib.suppress(*_LANCE_ERRORS):
                compaction.merge_files(dataset, all_files=False)
                compaction.bring_indexes_up(dataset, self.indexed, all_rows=False)

    def _commit(self, dataset: Any, change: Callable[[Any], object], failure: str) -> Any:
        """Change a dataset, again on its latest version while others are quicker, and return it as it is then."""
        for attempt in range(_ATTEMPTS):
            try:
                change(dataset)
                return dataset
            except _LANCE_ERRORS as error:
                # Lance rebases appends itself; only when it gave up is there a conflict left.
                if attempt == _ATTEMPTS - 1 or "conflict" not in str(error).lower():
                    raise self._error(failure, error) from error
            time.sleep(random.uniform(0, 0.02 * 2**attempt))
            dataset = self.dataset()
        return dataset

    def _create(self) -> Any:
        """Make the table empty, elsewhere, and move it into place; whoever comes second finds it there.

        Creating it in place would not do: of two Lance writers that create one table at once, the second replaces the
        rows of the first, and both report success (github.com/lance-format/lance/issues/4451).
        """
        place, draft = Path(self.uri), f"{self.uri}.tmp-{uuid.uuid4().hex}"
        try:
            replace(self, uri=draft).create()
            Path(draft).rename(place)  # fails if a folder with content is there
        except OSError as error:
            if not place.is_dir():
                raise self._error("cannot be made", error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return self.dataset()

    def create(self) -> None:
        """Make the table empty at a place that nobody else uses.

        Raises:
            StorageError: if it cannot be written.
        """
        try:
            # Stable row ids grow with the commits: merging files moves rows behind those that others append meanwhile.
            _lance().write_dataset(
                self.schema.empty_table(),
                self.uri,
                mode="create",
                storage_options=dict(self.options),
                enable_stable_row_ids=True,
            )
        except _LANCE_ERRORS as error:
            raise self._error("cannot be made", error) from error

    def compact(self) -> tuple[int, int]:
        """Merge all small files and index all rows; returns how many files there were and are.

        Appending does this by itself, little by little. Rows and their order stay, and so do earlier versions.

        Raises:
            StorageError: if the table cannot be written.
        """
        dataset = self.dataset()
        if dataset is None:
            return 0, 0
        before = len(dataset.get_fragments())

        def change(latest: Any) -> None:
            compaction.merge_files(latest, all_files=True)
            compaction.bring_indexes_up(latest, self.indexed, all_rows=True)

        return before, len(self._commit(dataset, change, "cannot be compacted").get_fragments())

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
            return _in_order(dataset.to_table(columns=names, filter=where, with_row_id=True))
        except _LANCE_ERRORS as error:
            raise self._error("cannot be read", error) from error

    def reader(self, columns: Sequence[str], version: int | None = None) -> Any:
        """Return columns, and ``_rowid``, a row's place in the order of commits, for DuckDB to read when it needs them.

        Raises:
            StorageError: if the table is damaged or has no such version.
        """
        dataset = self.dataset(version) if version != 0 else None
        if dataset is None:
            fields = [*(self.schema.field(name) for name in columns), pa.field(_PLACE, pa.uint64())]
            return pa.schema(fields).empty_table()
        return dataset.scanner(columns=list(columns), with_row_id=True)

    def scan_in(
        self,
        column: str,
        values: Iterable[str],
        where: str = "true",
        columns: Sequence[str] | None = None,
        version: int | None = None,
    ) -> list[dict[str, Any]]:
        """Read the rows whose ``column`` is one of ``values`` and that satisfy ``where``, in the order of commits.

        Args:
            column: a column of text.
            values: what it may be.
            where: SQL condition on the columns.
            columns: columns to read, ``column`` among them; all by default.
            version: version to read; the latest by default.
        """
        wanted = sorted(set(values))
        if not wanted:
            return []
        if len(wanted) <= _IN_LIST:
            matching = self.scan(f"{column} IN ({', '.join(map(quote, wanted))}) AND {where}", columns, version)
        else:  # so many look-ups take longer than reading all
            matching = self.scan(where, columns, version)
            matching = matching.filter(pc.is_in(matching[column], value_set=pa.array(wanted)))
        rows: list[dict[str, Any]] = matching.to_pylist()
        return rows

    def _error(self, what: str, error: Exception) -> StorageError:
        remedy = remedy_for(error)
        if not remedy and "://" not in self.uri and _DAMAGED.search(str(error)):
            remedy = "; restore it from a copy, or use another --home"
        return StorageError(f"table {self.name} at {self.uri} {what}: {first_line(error)}{remedy}")


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
        raise StorageError(f"table {name}: a value does not fit its column: {first_line(error)}") from error


def _in_order(rows: pa.Table) -> pa.Table:
    """Sort rows by their place in the order of commits, where they are not, and drop it."""
    places = rows[_PLACE].to_numpy()
    if (places[1:] < places[:-1]).any():
        rows = rows.take(np.argsort(places))
    return rows.drop_columns(_PLACE)


def quote(value: str) -> str:
    """Return a SQL text literal."""
    return "'" + value.replace("'", "''") + "'"


def _lance() -> ModuleType:
    os.environ.setdefault("LANCE_LOG", "error")  # Lance's Rust side logs to standard error
    import lance

    module: ModuleType = lance
    return module
