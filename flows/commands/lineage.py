"""The commands `kvp lineage`, `kvp diff` and `kvp openlineage`: what came from what, for people and other programs."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import HomeOption, JsonOption
from flows.runtime.process import existing_home
from storage.errors import StorageError

if TYPE_CHECKING:
    from storage.catalog.catalog import Catalog
    from storage.lineage.graph import LineageGraph

IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="An artifact, a run, an MLflow run, or 6+ first characters")
]


def lineage(
    any_id: IdArgument,
    home: HomeOption = None,
    up: Annotated[bool, typer.Option("--up", help="What it came from (the default)")] = False,
    down: Annotated[bool, typer.Option("--down", help="What came from it")] = False,
    as_json: JsonOption = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write a picture (.svg, .html) or W3C PROV (.prov.json, .provn) instead", metavar="FILE"),
    ] = None,
) -> None:
    """Show what something came from, or what came from it."""
    from storage.lineage.graph import render_tree

    if up and down:
        raise typer.BadParameter("choose one of --up and --down")
    if out is not None and as_json:
        raise typer.BadParameter("choose one of --json and --out")
    render = None if out is None else _renderer(out)
    graph = _catalog(home).lineage(any_id, "down" if down else "up")
    if out is not None and render is not None:
        _write(out, render(graph))
        print(out)
    else:
        print(json.dumps(graph.to_json(), default=str) if as_json else "\n".join(render_tree(graph)))


def diff(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run, or an artifact or MLflow run that one made")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The other")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two runs: inputs, parameters, code, environment, and results that moved."""
    from flows.display.printing import print_records
    from storage.catalog.run_differences import compare_runs

    differences = compare_runs(_catalog(home), first, second)
    if differences or as_json:
        print_records([vars(difference) for difference in differences], as_json=as_json)
    else:
        print("nothing differs")


def openlineage(
    any_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Only the runs that lead to this [default: all runs]")
    ] = None,
    home: HomeOption = None,
    send: Annotated[bool, typer.Option("--send", help="Send them to the configured receiver")] = False,
) -> None:
    """Make the OpenLineage events of recorded runs again, one JSON object a line; docs/lineage.md describes them."""
    from storage.catalog.recorded_runs import recorded_runs
    from storage.openlineage.delivery import event_lines, send_events
    from storage.openlineage.events import run_events

    catalog = _catalog(home)
    runs = None if any_id is None else [n.id for n in catalog.lineage(any_id).nodes.values() if n.kind == "run"]
    events = (event for recorded in recorded_runs(catalog, runs) for event in run_events(recorded))
    if send:
        print(f"{send_events(events)} events sent")
    else:
        sys.stdout.writelines(event_lines([event]) for event in events)


def _catalog(home: str | None) -> "Catalog":
    from storage.catalog.catalog import Catalog

    return Catalog(existing_home(home))


def _renderer(out: Path) -> "Callable[[LineageGraph], str]":
    """What makes the content of a file that is named so."""
    from dashboards.lineage.picture import draw_lineage, render_lineage_page
    from storage.lineage.provenance import render_provenance

    renderers: dict[str, Callable[[LineageGraph], str]] = {
        ".svg": lambda graph: draw_lineage(graph).svg,
        ".html": render_lineage_page,
        ".prov.json": lambda graph: render_provenance(graph, "json"),
        ".provn": lambda graph: render_provenance(graph, "provn"),
    }
    renderer = next((render for ending, render in renderers.items() if out.name.lower().endswith(ending)), None)
    if renderer is None:
        raise typer.BadParameter(f"--out is {str(out)!r}, expected a name that ends with {', '.join(renderers)}")
    return renderer


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}; choose another --out") from error
