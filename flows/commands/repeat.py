"""The commands `kvp stale` and `kvp rerun`: list stages that would run again, and repeat a recorded run to compare."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import HomeOption, JsonOption
from flows.runtime.process import prepared_home, standard_output_kept_clean
from flows.services.prefect_server import own_server

if TYPE_CHECKING:
    from flows.replay.repetition import Repetition

_DIFFERS = 1  # exit status of a repetition that came to something else


def stale(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show which stages their requests would run again now, and which code, parameter or input is the cause."""
    opened = prepared_home(home)
    with standard_output_kept_clean():
        from flows.display.printing import print_records
        from flows.replay.staleness import LABELS, stale_stages
        from storage.catalog.catalog import Catalog
        from storage.catalog.requests import recorded_requests

        requests = recorded_requests(Catalog(opened), LABELS)
        stages = stale_stages(opened, requests)
    if stages or as_json:
        print_records([stage.to_record() for stage in stages], as_json=as_json)
    else:
        print("nothing is stale" if requests else "no request is recorded here: there is nothing to ask about")


def rerun(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or an artifact or MLflow run that one made")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Repeat a run from its record and compare the results; exit with 1 if they differ. Nothing there changes."""
    opened = prepared_home(home)
    with standard_output_kept_clean(), own_server(opened) as wait_for_server:
        from flows.replay import recorded, repetition

        original = recorded.find_original(opened, run)  # refuses a run before waiting for the server
        wait_for_server()
        outcome = repetition.rerun(original.known.run_id, str(opened.path))
    if as_json:
        print(json.dumps(dataclasses.asdict(outcome), default=str, allow_nan=False))
    else:
        _print(outcome)
    if not outcome.identical:
        raise typer.Exit(_DIFFERS)


def _print(outcome: "Repetition") -> None:
    from flows.display.printing import print_records

    verdict = "identical, to the last digit" if outcome.identical else "different"
    print(f"{outcome.run} repeats {outcome.repeats} ({outcome.stage}, {outcome.seconds:.1f} s): {verdict}")
    if outcome.differences:
        print_records([vars(difference) for difference in outcome.differences], as_json=False)
    if outcome.kept:
        print(f"what it made is kept in {outcome.kept}")
