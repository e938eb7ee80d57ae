"""Repeating a run from its record, to see whether it comes to the same.

The repetition runs in the same home with the recorded configuration, inputs and seed, and with today's code. It cannot
get into the way of what is there: its run counts as `repeated`, which no stage and no table of results takes up, and
what would meet the original's in one store, traces and MLflow's runs, goes to a folder beside. That folder stays only
if the results differ.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.process import prepare_process
from flows.recorded import Original, Recorded, find_original
from flows.stages import run_collection, run_evaluation, run_trainings
from kvpolicy.errors import InputError
from kvpolicy.methods.registry import METHODS
from kvpolicy.objectives.registry import OBJECTIVES
from kvpolicy.registry import Choice
from storage.catalog import Catalog
from storage.differences import Difference, compare_runs, recorded_modules
from storage.home import Home
from storage.tables import quote
from tasks.analyse import analyse_shard
from tasks.collect import collect_fragment
from tasks.evaluate import evaluate_shard
from tasks.progress import LOGGER
from tasks.prompts import write_prompts
from tasks.purpose import Purpose, acting_for
from tasks.soft_tokens import train_judge
from tasks.stage import loaded_code, note_loaded_code
from tasks.train import train_heads

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
    _tell_other_code(opened, original)
    own_id = str(flow_run.get_id())
    beside = opened.path / "repeats" / own_id
    purpose = Purpose(request_id=original.request_id, repeats=original.known.run_id)
    collects = original.row["stage"] in ("collect", "collect-fragment")
    traces = str(beside / "traces") if collects else opened.traces_place
    place = _HomeBeside(path=opened.path, traces_place=traces, beside=beside)
    worth_keeping = False
    try:
        with acting_for(purpose):
            _, repeat = _STAGES[original.row["stage"]]
            repeat(Recorded(place, original))
        found = _compare(opened, original, own_id)
        worth_keeping = not found.identical and beside.exists()
    finally:
        if not worth_keeping:
            shutil.rmtree(beside, ignore_errors=True)
            with suppress(OSError):  # another repetition's lies there
                beside.parent.rmdir()
    return dataclasses.replace(found, kept=str(beside) if worth_keeping else "")


def _tell_other_code(home: Home, original: Original) -> None:
    before = recorded_modules(Catalog(home), original.known)
    now = loaded_code(_STAGES[original.row["stage"]][0], _choices(original))
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        LOGGER.info("the code is not what %s ran: %s", original.known.run_id, ", ".join(changed))


def _choices(original: Original) -> tuple[Choice, ...]:
    """The methods or the objective that the request chose."""
    stage, config = original.row["stage"], original.request.config
    if stage in ("evaluate", "evaluate-shard", "analyse-shard"):
        return METHODS.choices(config.evaluate.contenders)
    return OBJECTIVES.choices([config.train.objective]) if stage in ("train", "train-heads") else ()


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


def _prompts(recorded: Recorded) -> None:
    told = recorded.parameters
    config, _ = recorded.config.prompts_of(told["split"])
    now = config.find_files().digests()
    changed = sorted(path for path in {*now, *told["texts"]} if now.get(path) != told["texts"].get(path))
    if changed:
        raise InputError(f"text {changed[0]} is not what {recorded.original.known.run_id} read: put it back as it was")
    write_prompts(
        recorded.home,
        recorded.model(),
        config,
        split=told["split"],
        num_samples_per_task=told["num_samples_per_task"],
        seed=recorded.seed,
    )


def _collect(recorded: Recorded) -> None:
    parts = [recorded.prompts(f"prompts_{split}") for split in ("train", "validation")]
    run_collection(recorded.home, recorded.model(), parts, recorded.config.collect)


def _collect_fragment(recorded: Recorded) -> None:
    told = recorded.parameters
    collect_fragment(
        recorded.home,
        recorded.model(),
        recorded.prompts(),
        recorded.config.collect,
        collection=told["collection"],
        first=told["first"],
    )


def _train(recorded: Recorded) -> None:
    snapshot = recorded.snapshot()
    run_trainings(recorded.home, recorded.model(), snapshot, recorded.config.train, seeds=[recorded.own_seed])


def _train_heads(recorded: Recorded) -> None:
    first, stop = recorded.parameters["heads"]
    snapshot = recorded.snapshot()
    train_heads(
        recorded.home, recorded.model(), snapshot, recorded.config.train, heads=(first, stop), seed=recorded.own_seed
    )


def _train_soft_tokens(recorded: Recorded) -> None:
    train_judge(
        recorded.home,
        recorded.model(),
        recorded.prompts(),
        recorded.config.soft_tokens,
        setting=recorded.parameters["setting"],
        seed=recorded.own_seed,
    )


def _evaluate(recorded: Recorded) -> None:
    run_evaluation(
        recorded.home,
        recorded.model(),
        recorded.trained(),
        recorded.prompts(),
        recorded.config.evaluate,
        seed=recorded.seed,
    )


def _analyse_shard(recorded: Recorded) -> None:
    told = recorded.parameters
    analyse_shard(
        recorded.home,
        recorded.model(),
        recorded.trained(),
        recorded.prompts(),
        recorded.config.evaluate,
        examples=(told["first"], told["stop"]),
        seed=recorded.seed,
    )


def _evaluate_shard(recorded: Recorded) -> None:
    evaluate_shard(
        recorded.home,
        recorded.model(),
        recorded.trained(),
        recorded.prompts(),
        recorded.config.evaluate,
        first=recorded.parameters["first"],
        seed=recorded.seed,
    )


# Stage -> the module whose code it is, and what runs it again.
_STAGES: Mapping[str, tuple[str, Callable[[Recorded], None]]] = {
    "prompts": ("tasks.prompts", _prompts),
    "collect": ("tasks.collect", _collect),
    "collect-fragment": ("tasks.collect", _collect_fragment),
    "train": ("tasks.train", _train),
    "train-heads": ("tasks.train", _train_heads),
    "train-soft-tokens": ("tasks.soft_tokens", _train_soft_tokens),
    "evaluate": ("tasks.publish", _evaluate),
    "analyse-shard": ("tasks.analyse", _analyse_shard),
    "evaluate-shard": ("tasks.evaluate", _evaluate_shard),
}
