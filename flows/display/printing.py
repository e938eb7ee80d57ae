"""Printing rows for people and for programs."""

import csv
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from storage.errors import StorageError

_WIDTH_OF_PIPES = 240


def print_rows(rows: Any, output: str) -> None:
    """Print an Arrow table as `table`, `json` (a list of objects), `csv` or the bytes of a `parquet` file.

    Raises:
        StorageError: If a value is beyond what Python can hold, such as an infinite date.
    """
    if output == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        content = pa.BufferOutputStream()
        pq.write_table(rows, content)
        sys.stdout.buffer.write(content.getvalue())
        return
    try:
        records = rows.to_pylist()
    except (OverflowError, ValueError) as error:
        raise StorageError(f"SQL: a value cannot be shown ({error}): cast it to VARCHAR") from error
    if output == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(rows.column_names)
        writer.writerows(record.values() for record in records)
    else:
        print_records(records, as_json=output == "json", columns=rows.column_names)


def print_records(records: Sequence[Mapping[str, Any]], *, as_json: bool, columns: Sequence[str] | None = None) -> None:
    """Print records as one JSON list or as a table."""
    if as_json:
        plain = [{name: _plain(value) for name, value in record.items()} for record in records]
        sys.stdout.write(json.dumps(plain, default=str, allow_nan=False) + "\n")
        return
    names = list(columns if columns is not None else records[0] if records else [])
    table = Table(box=None, header_style="bold")
    for name in names:
        table.add_column(Text(name), overflow="fold")
    for record in records:
        table.add_row(*(Text(_text(record[name])) for name in names))
    console().print(table)


def console() -> Console:
    """A console on standard output that does not fold what goes into a pipe, and prints text as it is."""
    width = None if sys.stdout.isatty() else _WIDTH_OF_PIPES
    return Console(width=width, highlight=False, markup=False, emoji=False)


def _plain(value: Any) -> Any:
    """What JSON can hold: it knows neither infinities nor what is no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
