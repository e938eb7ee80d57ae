"""Repeating a run from its record, to see whether it comes to the same.

The repetition runs in the same home with the recorded configuration, inputs and seed, and with today's code. It cannot
get into the way of what is there: its run counts as `repeated`, which no stage and no table of results takes up, and
what would meet the original's in one store, traces and MLflow's runs, goes to a folder beside. That folder stays only
if the results differ.
"""

import dataclasses
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.replay.recorded import Original, Recorded, find_original
from flows.runtime.process import prepare_process
from flows.stages import STAGES, run_works
from storage.catalog.catalog import Catalog
from storage.catalog.run_differences import Difference, compare_runs, recorded_modules
from storage.home import Home
from storage.tables.lance_table import quote
from tasks.collect import CollectionWork
from tasks.framework.progress import LOGGER
from tasks.framework.purpose import Purpose, acting_for
from tasks.framework.stage import note_loaded_code
from tasks.framework.work import Record

_NO_RESULTS = ("code", "environment")  # kinds of differences that are none of the results


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """What came of a repetition.

    Attributes:
        run: The new run.
        repeats: The run that it repeats.
        stage: Their stage.
        identical: Whether all results are the same, to the last digit.
        seconds: That it took.
        kept: Folder of traces and MLflow's runs that differ; empty if nothing does.
        differences: What is not the same; of code and environment also where the results are.
    """

    run: str
    repeats: str
    stage: str
    identical: bool
    seconds: float
    kept: str
    differences: list[Difference]


@dataclass(frozen=True, kw_only=True)
class _HomeBeside(Home):
    """The home, but with an MLflow of its own."""

    beside: Path

    @property
    def mlflow(self) -> Path:
        return self.beside / "mlflow"


@flow(name="rerun")
def rerun(run: str, home: str) -> Repetition:
    """Repeat a run and compare the results; nothing that is there changes."""
    opened = Home.open(home)
    original = find_original(opened, run)
    note_loaded_code()
    prepare_process()
    _log_other_code(opened, original)
    own_id = str(flow_run.get_id())
    beside = opened.path / "repeats" / own_id
    purpose = Purpose(request_id=original.request_id, repeats=original.known.run_id)
    stage = original.row["stage"]
    collects = stage in (CollectionWork.name, *CollectionWork.part_kinds)
    traces = str(beside / "traces") if collects else opened.traces_place
    place = _HomeBeside(path=opened.path, traces_place=traces, beside=beside)
    worth_keeping = False
    try:
        with acting_for(purpose):
            _repeat(Recorded(place, original), stage)
        repetition = _compare(opened, original, own_id)
        worth_keeping = not repetition.identical and beside.exists()
    finally:
        if not worth_keeping:
            shutil.rmtree(beside, ignore_errors=True)
            with suppress(OSError):  # another repetition's lies there
                beside.parent.rmdir()
    return dataclasses.replace(repetition, kept=str(beside) if worth_keeping else "")


def _repeat(record: Record, stage: str) -> None:
    for kind in STAGES:
        if kind.name == stage:
            run_works([kind.recorded(record)])
        elif stage in kind.part_kinds:
            kind.part_kinds[stage].repeat(record)


def _log_other_code(home: Home, original: Original) -> None:
    catalog, stage, given = Catalog(home), original.row["stage"], (original.request.config, original.parameters)
    before = recorded_modules(catalog, original.known)
    now = next(kind.code_of(stage, *given) for kind in STAGES if stage in (kind.name, *kind.part_kinds))
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        LOGGER.info("the code is not what %s ran: %s", original.known.run_id, ", ".join(changed))


def _compare(home: Home, original: Original, flow_run_id: str) -> Repetition:
    catalog, stage = Catalog(home), original.row["stage"]
    where = f"prefect_flow_run_id = {quote(flow_run_id)} AND stage = {quote(stage)} AND outcome = 'repeated'"
    row = catalog.rows("runs", where)[-1]
    differences = compare_runs(catalog, original.known.run_id, row["run_id"])
    return Repetition(
        run=row["run_id"],
        repeats=original.known.run_id,
        stage=stage,
        identical=all(difference.kind in _NO_RESULTS for difference in differences),
        seconds=row["seconds"],
        kept="",
        differences=differences,
    )
