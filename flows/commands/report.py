"""The command `kvp report`: one evaluation's figures and tables, as a page and as Markdown."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import HomeOption
from flows.runtime.process import configure_libraries, home_path
from kvpolicy.errors import first_line
from storage.errors import StorageError
from storage.home import Home


def report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="An evaluation, its run, an MLflow run, or one of its curves; 6+ first characters do"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and report.md [default: the evaluation's figures]", metavar="FOLDER"),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Write a report of one evaluation: its figures and tables, with where every number is from."""
    configure_libraries()
    from dashboards.report.comparing import objective_comparisons, task_comparisons
    from dashboards.report.evaluation_rows import read_report_rows
    from dashboards.report.writing import write_report
    from flows.display.figures import figure_folder
    from storage.catalog.catalog import Catalog

    opened = Home.open(home_path(home), create=False)
    catalog = Catalog(opened)
    rows = read_report_rows(catalog, run)
    rows = replace(
        rows,
        task_comparisons=list(task_comparisons(catalog, rows)),
        objective_comparisons=objective_comparisons(catalog, rows),
    )
    folder = figure_folder(opened, rows.evaluation_id) if out is None else out
    try:
        for path in write_report(rows, folder):
            print(path)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from error
    except ValueError as error:
        raise StorageError(f"report: {rows.evaluation_id} cannot be drawn: {first_line(error)}") from error
