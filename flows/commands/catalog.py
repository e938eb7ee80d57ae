"""The commands that query and maintain the catalog: `sql` and `compact`."""

import datetime as dt
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import HomeOption, JsonOption, is_whole_number
from flows.runtime.process import existing_home


class Format(StrEnum):
    """How rows are printed."""

    table = "table"
    json = "json"
    csv = "csv"
    parquet = "parquet"


def sql(
    query: Annotated[str | None, typer.Argument(help="One SELECT over the catalog's tables and views")] = None,
    home: HomeOption = None,
    file: Annotated[Path | None, typer.Option(help="File that holds the query")] = None,
    at: Annotated[str | None, typer.Option(help="As of a version (a number) or a UTC time: 2026-11-30T09:00")] = None,
    output: Annotated[Format, typer.Option("--format", help="How to print the rows")] = Format.table,
) -> None:
    """Ask the catalog in SQL; `SELECT * FROM views` shows the ready-made views."""
    from flows.display.printing import print_rows
    from storage.catalog.catalog import Catalog

    if (query is None) == (file is None):
        raise typer.BadParameter("give one query, or --file with one")
    if file is not None:
        try:
            query = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--file {file} cannot be read: {error}") from error
    print_rows(Catalog(existing_home(home)).sql(query or "", at=_moment(at)), output.value)


def compact(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Merge the small files of the catalog and of the traces' manifest, and index all rows.

    Writing does this by itself, little by little. Every earlier version stays readable.
    """
    from flows.display.printing import print_records
    from storage.catalog.catalog import Catalog
    from storage.traces.store import TraceStore

    opened = existing_home(home)
    files = {**Catalog(opened).compact(), "manifest": TraceStore(opened.traces).compact()}
    print_records(
        [{"table": name, "files_before": before, "files": after} for name, (before, after) in files.items()],
        as_json=as_json,
    )


def _moment(text: str | None) -> int | dt.datetime | None:
    if text is None or is_whole_number(text):
        return None if text is None else int(text)
    try:
        return dt.datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"--at is {text!r}, expected a version (a number) or a time such as 2026-11-30T09:00"
        ) from None
