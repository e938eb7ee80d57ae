"""Repeating a run from its record, to see whether it comes to the same.

The repetition runs in the same home with the recorded configuration, inputs and seed, and with today's code. It cannot
get into the way of what is there: its run counts as `repeated`, which no stage and no table of results takes up, and
what would meet the original's in one store, traces and MLflow's runs, goes to a folder beside. That folder stays only
if the results differ.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.process import prepare_process
from flows.request import Request
from flows.stages import run_collection, run_evaluation, run_training
from kvpolicy.errors import InputError
from storage.artifacts import Artifact
from storage.catalog import Catalog, CompletedRun
from storage.differences import Difference, compare_runs, find_run, recorded_modules
from storage.home import Home
from storage.tables import quote
from tasks.collect import collect_fragment, snapshot_ref
from tasks.evaluate import evaluate_shard
from tasks.model import recorded_model
from tasks.progress import LOGGER
from tasks.prompts import prompts_ref, write_prompts
from tasks.purpose import Purpose, acting_for
from tasks.references import ModelRef, PolicyRef, PromptsRef, SnapshotRef
from tasks.stage import loaded_code, lost_results, note_loaded_code
from tasks.train import policy_ref, train_heads

_NO_RESULTS = ("code", "environment")  # kinds of differences that are none of the results


@dataclass(frozen=True, kw_only=True)
class Original:
    """A run that can be repeated.

    Attributes:
        row: Its row in the table `runs`.
        known: What it read and made.
        request: What it ran for.
        request_id: Artifact of that.
    """

    row: Mapping[str, Any]
    known: CompletedRun
    request: Request
    request_id: str

    @property
    def parameters(self) -> dict[str, Any]:
        """Its parameters."""
        return dict(json.loads(self.row["parameters_json"]))


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


def find_original(home: Home, any_id: str) -> Original:
    """Find the run that is meant, if it can be repeated.

    Args:
        home: The home.
        any_id: A run, or an artifact or MLflow run that one made; 6 or more first characters do.

    Raises:
        InputError: If the run did not make anything itself, or its request was not recorded.
        StorageError: If the id is unknown or ambiguous, or no run made that artifact.
    """
    catalog = Catalog(home)
    row = find_run(catalog, any_id)
    if any_id.startswith("run-") and not row["run_id"].startswith(any_id):  # it was taken for the one it stands on
        raise InputError(f"{any_id} was skipped: repeat {row['run_id']}, which it stands on")
    if row["outcome"] != "completed":
        raise InputError(
            f"{row['run_id']} {_WHY_NOT[row['outcome']]} ({row['reason']}): only a completed run can be repeated"
        )
    known = catalog.completed_run(row)
    request_id = known.inputs.get("request")
    if request_id is None or row["stage"] not in _STAGES:
        raise InputError(
            f"{row['run_id']} has no recorded request, which runs of earlier releases lack: "
            "run the pipeline again with its options, then that run can be repeated"
        )
    request = Request.from_artifact(catalog.artifact(request_id))
    return Original(row=row, known=known, request=request, request_id=request_id)


_WHY_NOT = {"failed": "failed", "repeated": "is a repetition itself"}


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
            repeat(_Recorded(place, original))
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
    now = loaded_code(_STAGES[original.row["stage"]][0])
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


class _Recorded:
    """What a recorded run read, as references for tasks; each is there and whole, or the repetition ends."""

    def __init__(self, home: Home, original: Original) -> None:
        self.home, self.original = home, original
        self.config, self.parameters = original.request.config, original.parameters
        self.seed = original.request.seed

    def model(self) -> ModelRef:
        return recorded_model(
            self.home,
            self.original.known.inputs["model"],
            dtype=self.config.dtype,
            source=self.original.request.model,
        )

    def prompts(self, role: str = "prompts") -> PromptsRef:
        artifact = self._whole(role, "")
        return prompts_ref(self.home, artifact.artifact_id, seed=self.seed)

    def snapshot(self) -> SnapshotRef:
        return snapshot_ref(self.home, self._whole("snapshot", "trace_fragment").artifact_id)

    def policies(self) -> list[PolicyRef]:
        roles = [role for role in self.original.known.inputs if role.startswith("policy_")]
        return [policy_ref(self.home, self._whole(role, "").artifact_id) for role in roles]

    def _whole(self, role: str, rests_on: str) -> Artifact:
        """The artifact that the run read in a role."""
        catalog, artifact_id = Catalog(self.home), self.original.known.inputs[role]
        maker = catalog.completed_run(find_run(catalog, artifact_id))
        only = dataclasses.replace(maker, outputs={role: artifact_id})
        lost = lost_results(self.home, only, rests_on=rests_on)
        if lost:
            raise InputError(
                f"{role} of {self.original.known.run_id}, {lost[0].artifact_id}, is lost or damaged at {lost[0].uri}: "
                "`kvp run` with the options of that run makes it again"
            )
        return catalog.artifact(artifact_id)


def _prompts(recorded: _Recorded) -> None:
    config, told = recorded.config.prompts, recorded.parameters
    now = dict(config.read_texts().digests)
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


def _collect(recorded: _Recorded) -> None:
    parts = [recorded.prompts(f"prompts_{split}") for split in ("train", "validation")]
    run_collection(recorded.home, recorded.model(), parts, recorded.config.collect)


def _collect_fragment(recorded: _Recorded) -> None:
    told = recorded.parameters
    collect_fragment(
        recorded.home,
        recorded.model(),
        recorded.prompts(),
        recorded.config.collect,
        collection=told["collection"],
        first=told["first"],
    )


def _train(recorded: _Recorded) -> None:
    snapshot = recorded.snapshot()
    run_training(recorded.home, recorded.model(), snapshot, recorded.config.train, seed=recorded.seed)


def _train_heads(recorded: _Recorded) -> None:
    first, stop = recorded.parameters["heads"]
    snapshot = recorded.snapshot()
    train_heads(
        recorded.home, recorded.model(), snapshot, recorded.config.train, heads=(first, stop), seed=recorded.seed
    )


def _evaluate(recorded: _Recorded) -> None:
    run_evaluation(
        recorded.home,
        recorded.model(),
        recorded.policies(),
        recorded.prompts(),
        recorded.config.evaluate,
        benchmark=recorded.config.prompts.benchmark,
        seed=recorded.seed,
    )


def _evaluate_shard(recorded: _Recorded) -> None:
    evaluate_shard(
        recorded.home,
        recorded.model(),
        recorded.policies(),
        recorded.prompts(),
        recorded.config.evaluate,
        first=recorded.parameters["first"],
        seed=recorded.seed,
    )


# Stage -> the module whose code it is, and what runs it again.
_STAGES: Mapping[str, tuple[str, Callable[[_Recorded], None]]] = {
    "prompts": ("tasks.prompts", _prompts),
    "collect": ("tasks.collect", _collect),
    "collect-fragment": ("tasks.collect", _collect_fragment),
    "train": ("tasks.train", _train),
    "train-heads": ("tasks.train", _train_heads),
    "evaluate": ("tasks.publish", _evaluate),
    "evaluate-shard": ("tasks.evaluate", _evaluate_shard),
}
