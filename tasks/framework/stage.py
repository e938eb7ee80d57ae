"""The one way to write a task: lineage and skipping in one place.

A task is a Prefect task whose body is guarded by its stage key (inputs, parameters, fingerprint of its code). If the
catalog has a completed run with that key, the body does not run and its result is found again; that is recorded too.
Prefect's own result cache is off: the catalog is the one memory of what was done. A repetition
(`tasks.framework.purpose`) runs in any case, and what it makes is never found again.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run, task_run

from kvpolicy.config.registry import Choice, installed_extensions, package_name
from kvpolicy.digests import digest_json
from storage.catalog.catalog import Artifact, Catalog, CompletedRun, RunRecorder
from storage.fingerprints import ProjectCode, stage_key
from storage.home import Home, exclusive
from storage.mlflow.deletions import has_run
from tasks.framework.purpose import Purpose, current_purpose
from tasks.framework.wholeness import find_damaged, require_declared
from tasks.framework.worker import keep_to_flow

# Modules of a stage that decide how it is run, shown and remembered, but not what comes out; and the registries, which
# list every choice: a stage names those that its request makes (`Stage.choices`).
_CHANGES_NO_RESULT = frozenset(
    {
        "kvpolicy.benchmarks.registry",
        "kvpolicy.methods.registry",
        "kvpolicy.models.convert",
        "kvpolicy.models.embedded",
        "kvpolicy.models.reference",
        "kvpolicy.objectives.registry",
        "kvpolicy.presets.pipeline_config",
        "kvpolicy.config.registry",
        "tasks.memory",
        "tasks.model",
        "tasks.framework.progress",
        "tasks.framework.purpose",
        "tasks.framework.references",
        "tasks.registration",
        "tasks.framework.stage",
        "tasks.training_memory",
        "tasks.framework.wholeness",
        "tasks.framework.work",
        "tasks.framework.worker",
    }
)

F = TypeVar("F", bound=Callable[..., Any])


def code_of(module: str) -> str:
    """Fingerprint of the code that the tasks of a module run, whatever is chosen, as this process has loaded it."""
    extensions = [
        package_name(entry) for kind in ("benchmark", "method", "objective") for entry in installed_extensions(kind)
    ]
    return digest_json([_project_code().module_digests(module), extensions])


def stage_task(name: str) -> Callable[[F], F]:
    """Decorate a function as a Prefect task of this project.

    Args:
        name: Of the task in Prefect.
    """
    return task(name=name, cache_policy=NO_CACHE, persist_result=False, log_prints=False)  # type: ignore[return-value]  # called as the function it was


@dataclass(frozen=True, kw_only=True)
class StageOutcome:
    """What a stage made, now or earlier.

    Attributes:
        run_id: The run that made it.
        mlflow_run_id: Its MLflow run, or empty.
        outputs: Name to artifact id.
        skipped: Whether an earlier run's result was found again.
        seconds: That it took now.
    """

    run_id: str
    mlflow_run_id: str
    outputs: Mapping[str, str]
    skipped: bool
    seconds: float


@functools.cache
def _project_code() -> ProjectCode:
    return ProjectCode("kvpolicy", "tasks")


@functools.cache
def loaded_code(module: str, choices: tuple[Choice, ...] = ()) -> Mapping[str, str]:
    """The code that changes the results of a stage: module to digest of its meaning, and package to its version."""
    modules = dict.fromkeys((module, *(choice.module for choice in choices)))
    packages = {f"{choice.package} (package)": choice.version for choice in choices if choice.package}
    return {**_project_code().module_digests(*modules, without=_CHANGES_NO_RESULT), **packages}


def note_loaded_code() -> None:
    """Read the sources of all tasks that this process has imported: files that change later change nothing here.

    Without it a stage's sources would be read when it begins, hours after the code that runs was loaded.
    """
    _project_code().module_digests(*(name for name in sorted(sys.modules) if name.startswith("tasks.")))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage about to run: everything that its result depends on.

    Attributes:
        name: Of the stage.
        module: Module whose code, with all that it imports from the science, is the stage's code.
        choices: What the request chooses from registries, such as an objective: the stage runs it as well.
        inputs: Name to artifact id.
        parameters: Everything else, as plain values.
        seed: Of the stage, if it draws.
        parts: Name to artifact id of parts made on the way from the same inputs (fragments, groups, shards): they
            belong to the lineage, and the key implies them.
        rests_on: Kind of artifact of which the result is only a list: one that is lost is a lost result.
    """

    name: str
    module: str
    inputs: Mapping[str, str]
    parameters: Mapping[str, Any]
    choices: tuple[Choice, ...] = ()
    seed: int | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    rests_on: str = ""

    @property
    def modules(self) -> Mapping[str, str]:
        """The code that the stage runs (`loaded_code`)."""
        return loaded_code(self.module, self.choices)

    @property
    def code(self) -> str:
        """Fingerprint of the stage's code."""
        return digest_json(self.modules)

    @property
    def key(self) -> str:
        """Same key, same result."""
        parameters = {**self.parameters, "seed": self.seed}
        return stage_key(self.name, inputs=self.inputs, parameters=parameters, code=self.code)


def find_completed(home: Home, stage: Stage) -> CompletedRun | None:
    """The run that has made the result of a stage, if all of what it made is still there and whole.

    There is none while a run is repeated: whatever is called then is called to be done again.
    """
    if current_purpose().repeats:
        return None
    run = Catalog(home).find_completed(stage.key)
    if run is None or lost_results(home, run, rests_on=stage.rests_on) or has_lost_tracking(home, run):
        return None
    return run


def has_lost_tracking(home: Home, run: CompletedRun) -> bool:
    """Whether a run was logged to MLflow and is no longer there, not even among what was deleted in its pages."""
    return bool(run.mlflow_run_id) and not has_run(home, run.mlflow_run_id)


def lost_results(home: Home, run: CompletedRun, *, rests_on: str) -> list[Artifact]:
    """What a run made, and inputs of the kind that its result rests on, that is no longer there or not whole."""
    made = set(run.outputs.values())
    artifacts = Catalog(home).artifacts([*run.outputs.values(), *run.inputs.values()])
    needed = (artifact for artifact in artifacts if artifact.artifact_id in made or artifact.kind == rests_on)
    return find_damaged(home, needed)


def run_stage(home: Home, stage: Stage, body: Callable[[RunRecorder], None], *, note_skip: bool = True) -> StageOutcome:
    """Run `body` unless its result is there already; record either. Of two processes, one runs and the other waits.

    Args:
        home: The home.
        stage: What is about to run.
        body: Does the work and names what it made.
        note_skip: Whether finding the result again is worth a row.

    Raises:
        InputError: If this is a worker of a flow that runs other code.
        Exception: Whatever the body raises, after the failure is recorded.
    """
    (outcome,) = run_together(home, [stage], lambda runs: body(runs[0]), note_skip=note_skip)
    return outcome


def run_together(
    home: Home, stages: Sequence[Stage], body: Callable[[Mapping[int, RunRecorder]], None], *, note_skip: bool = True
) -> list[StageOutcome]:
    """Run `body` once for those stages whose results are not there: they share work, and each has a run of its own.

    Args:
        home: The home.
        stages: What is about to run.
        body: Does the work of the stages that it is given the runs of, by their places; it is not called for none.
        note_skip: Whether finding a result again is worth a row.

    Returns:
        The outcome of each stage, in their order.

    Raises:
        InputError: If this is a worker of a flow that runs other code.
        Exception: Whatever the body raises, after the failure is recorded in every run.
    """
    for module in dict.fromkeys(stage.module for stage in stages):
        keep_to_flow(code_of(module))
    started, purpose = time.monotonic(), current_purpose()
    with ExitStack() as locks:
        for key in sorted(stage.key for stage in stages):  # in one order, so that no two processes wait for each other
            locks.enter_context(exclusive(home, key[:32]))
        earlier = [find_completed(home, stage) for stage in stages]
        missing = [place for place, run in enumerate(earlier) if run is None]
        recorders: dict[int, RunRecorder] = {}
        with ExitStack() as records:
            for place in missing:
                record = _record(home, stages[place], purpose, shared_by=len(missing))
                recorders[place] = records.enter_context(record)
            try:
                if recorders:
                    body(recorders)
                for run in recorders.values():
                    require_declared(artifact.kind for artifact in run.outputs.values())
            except Exception as failure:
                names = ", ".join(run.run_id for run in recorders.values())
                failure.add_note(f"stage {stages[missing[0]].name}, run {names}")
                raise
        seconds = time.monotonic() - started
        for stage, earlier_run in zip(stages, earlier, strict=True):
            if earlier_run is not None and note_skip:
                _note_skip(home, stage, earlier_run, purpose)
    return [
        _made(recorders[place], seconds) if earlier_run is None else _found(earlier_run, seconds)
        for place, earlier_run in enumerate(earlier)
    ]


def _prefect_ids() -> dict[str, str]:
    return {
        "prefect_flow_run_id": flow_run.get_id() or "",
        "prefect_task_run_id": task_run.get_id() or "",
    }


def _record(home: Home, stage: Stage, purpose: Purpose, *, shared_by: int) -> AbstractContextManager[RunRecorder]:
    return Catalog(home).record_run(
        stage=stage.name,
        stage_key=stage.key,
        parameters=stage.parameters,
        seed=stage.seed,
        inputs={**stage.inputs, **stage.parts, **({"request": purpose.request_id} if purpose.request_id else {})},
        code_fingerprint=stage.code,
        modules=stage.modules,
        repeats=purpose.repeats,
        shared_by=shared_by,
        **_prefect_ids(),
    )


def _note_skip(home: Home, stage: Stage, earlier: CompletedRun, purpose: Purpose) -> None:
    Catalog(home).record_skip(
        stage=stage.name,
        stage_key=stage.key,
        reused_run_id=earlier.run_id,
        parameters=stage.parameters,
        seed=stage.seed,
        code_fingerprint=stage.code,
        request_id=purpose.request_id,
        **_prefect_ids(),
    )


def _found(run: CompletedRun, seconds: float) -> StageOutcome:
    return StageOutcome(
        run_id=run.run_id, mlflow_run_id=run.mlflow_run_id, outputs=run.outputs, skipped=True, seconds=seconds
    )


def _made(run: RunRecorder, seconds: float) -> StageOutcome:
    outputs = {name: artifact.artifact_id for name, artifact in run.outputs.items()}
    return StageOutcome(
        run_id=run.run_id, mlflow_run_id=run.mlflow_run_id, outputs=outputs, skipped=False, seconds=seconds
    )
