"""The command `kvp watch`: look at the sources once, and run a pipeline for every new model."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import HomeOption, JsonOption
from flows.runtime.process import (
    configure_libraries,
    open_home,
    point_prefect_at,
    prepared_home,
    standard_output_kept_clean,
    watched_sources,
)
from flows.services.prefect_server import own_server

if TYPE_CHECKING:
    from flows.watch import WatchReport


def watch(
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="folder:PATH, hub:owner/name[@revision] or mlflow:NAME[@alias]; repeatable [default: KVP_WATCH]",
            metavar="PLACE",
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="Preset of the pipelines, as for `kvp run`")] = "demo",
    home: HomeOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the pipelines", min=0, max=2**63 - 1)] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the pipelines, as for `kvp run`; repeatable", metavar="FIELD=VALUE"),
    ] = None,
    settle: Annotated[float, typer.Option(help="Seconds that new files must stay as they are", min=0, max=3600)] = 5.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Look at sources of models once, and run the pipeline for every model that the catalog does not know."""
    configure_libraries()
    from flows.runtime.run_options import Choices
    from kvpolicy.errors import InputError
    from kvpolicy.models.model_sources import ModelSource

    sources = source or watched_sources()
    if not sources:
        raise InputError("watch: no source: name one with --source, such as folder:./models, or in KVP_WATCH")
    choices = Choices(settings=settings or None)
    # Refuse wrong options before anything is written.
    choices.configure(preset)
    sources = [str(ModelSource.parse(text)) for text in sources]
    asked = {"sources": sources, "preset": preset, "seed": seed, "choices": choices, "settle_s": settle}
    with standard_output_kept_clean():
        if dry_run:
            opened = prepared_home(home)
            from flows.watch import watch_models

            report = watch_models.fn(**asked, home=str(opened.path), dry_run=True)
        else:
            opened = open_home(home)
            point_prefect_at(opened.path)
            with own_server(opened) as wait_for_server:
                from flows.watch import watch_models

                wait_for_server()
                report = watch_models(**asked, home=str(opened.path))
    _print(report, as_json=as_json)
    if any(sighting.outcome == "failed" for sighting in report.sightings):
        raise typer.Exit(1)


def _print(report: "WatchReport", *, as_json: bool) -> None:
    from flows.display.printing import print_records

    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
    elif report.busy:
        print(f"another watcher is at work in {report.home}: nothing was looked at")
    elif not report.sightings:
        print("nothing new")
    else:
        columns = ["outcome", "reference", "digest", "reason"]
        records = [
            {name: getattr(sighting, name) for name in columns} | {"digest": sighting.digest[:12]}
            for sighting in report.sightings
        ]
        print_records(records, as_json=False)
