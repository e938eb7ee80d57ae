"""The flows: collect, train and evaluate, and `retrain`, which chains them. Wiring only.

Each flow may run alone: what it needs from earlier stages is found again in the catalog by stage key. References
travel, tensors do not.
"""

import dataclasses
import time
from functools import partial

from prefect import flow

from flows.fan_out import run_parts
from flows.figures import draw_figures
from flows.options import Choices, Preset, Runner
from flows.plan import Plan, planned
from flows.promotion import decide_after_evaluation
from flows.run_artifact import leave_artifact, leaving_failure
from flows.run_progress import showing_run
from flows.stages import expected_parts, run_collection, run_evaluation, run_trainings
from flows.summary import StageReport, summarise
from kvpolicy.errors import InputError
from kvpolicy.models.reference import EMBEDDED
from tasks.collect import snapshot_ref
from tasks.references import SnapshotRef, TrainedRef
from tasks.soft_tokens import train_judge
from tasks.stage import StageOutcome, find_completed
from tasks.trained import trained_ref

NO_CHOICES = Choices()
HERE = Runner()


@flow(name="collect")
def collect(
    preset: Preset = "demo",
    model: str = EMBEDDED,
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
    *,
    runner: Runner = HERE,
) -> StageReport:
    """Run a model over generated prompts; keys, values and importance go into the trace store."""
    with planned(preset=preset, model=model, home=home, seed=seed, choices=choices, runner=runner) as plan:
        started = time.monotonic()
        prompts = (plan.train_prompts, plan.heldout_prompts)
        snapshot, outcome = run_collection(plan.home, plan.model, prompts, plan.config.collect)
        return _report(snapshot.artifact_id, outcome, started)


@flow(name="train")
def train(
    preset: Preset = "demo",
    model: str = EMBEDDED,
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
    *,
    runner: Runner = HERE,
) -> StageReport:
    """Train one policy per KV head on the collected traces, with as many seeds as are judged; reports the first."""
    with planned(preset=preset, model=model, home=home, seed=seed, choices=choices, runner=runner) as plan:
        started = time.monotonic()
        snapshot = find_snapshot(plan)
        trained = run_trainings(plan.home, plan.model, snapshot, plan.config.train, seeds=plan.policy_seeds)
        if plan.needs("soft_tokens"):
            about = (plan.home, plan.model, plan.train_prompts, plan.config.soft_tokens)
            setting = plan.config.collect.setting
            trained += run_parts(
                "train soft tokens",
                [partial(train_judge, *about, setting=setting, seed=own) for own in plan.policy_seeds],
            )
        policy, outcome = trained[0]
        skipped = all(found.skipped for _, found in trained)
        return _report(policy.artifact_id, dataclasses.replace(outcome, skipped=skipped), started)


@flow(name="evaluate")
def evaluate(
    preset: Preset = "demo",
    model: str = EMBEDDED,
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
    *,
    runner: Runner = HERE,
) -> StageReport:
    """Judge the policies and every heuristic on held-out prompts; curves go into MLflow and the catalog."""
    with planned(preset=preset, model=model, home=home, seed=seed, choices=choices, runner=runner) as plan:
        started = time.monotonic()
        trained, config = find_trained(plan), plan.config.evaluate
        evaluation, outcome = run_evaluation(plan.home, plan.model, trained, plan.test_prompts, config, seed=seed)
        draw_figures(plan.home, evaluation)
        return _report(evaluation.artifact_id, outcome, started)


@flow(name="retrain")
def retrain(
    preset: Preset = "demo",
    model: str = EMBEDDED,
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
    *,
    runner: Runner = HERE,
) -> dict[str, StageReport]:
    """Collect, train and evaluate, one after the other, and decide whether the new policy set becomes champion.

    What is there already is not done again.
    """
    started = time.monotonic()
    options = {"preset": preset, "model": model, "home": home, "seed": seed, "choices": choices, "runner": runner}
    # The plan is open to the end, so that all stages run on the same workers.
    with leaving_failure(preset=preset, model=model, home=home, seed=seed), planned(**options) as plan:
        prepared = StageReport(
            artifact_id=plan.model.artifact_id, run_id="", seconds=time.monotonic() - started, skipped=False
        )
        with showing_run(expected_parts(plan)):
            reports = {
                "prepare": prepared,
                "collect": collect(**options),
                "train": train(**options),
                "evaluate": evaluate(**options),
            }
            trained, judged = reports["train"], reports["evaluate"]
            decide_after_evaluation(
                plan,
                challenger_id=trained.artifact_id,
                evaluation_id=judged.artifact_id,
                evaluation_run_id=judged.run_id,
            )
    leave_artifact(plan.home, summarise(plan.home, reports))
    return reports


def _report(artifact_id: str, outcome: StageOutcome, started: float) -> StageReport:
    return StageReport(
        artifact_id=artifact_id,
        run_id=outcome.run_id,
        seconds=time.monotonic() - started,
        skipped=outcome.skipped,
    )


def find_snapshot(plan: Plan) -> SnapshotRef:
    """The traces that a training of this plan reads.

    Raises:
        InputError: If they were not collected.
    """
    found = find_completed(plan.home, plan.collection)
    if found is None:
        raise InputError(
            f"train: {plan.home.path} has no traces for this model, preset, tasks, seed and code: "
            f"run `kvp collect --preset {plan.config.preset}` with the same options first"
        )
    return snapshot_ref(plan.home, found.outputs["snapshot"])


def find_trained(plan: Plan) -> list[TrainedRef]:
    """What the methods of an evaluation of this plan are made from: policy sets and soft tokens, one a seed.

    Raises:
        InputError: If one was not trained.
    """
    stages = [(stage, "policy") for stage in plan.trainings(find_snapshot(plan))] if plan.needs("policy_set") else []
    stages += [(stage, "soft_tokens") for stage in plan.soft_token_trainings] if plan.needs("soft_tokens") else []
    trained = []
    for stage, output in stages:
        found = find_completed(plan.home, stage)
        if found is None:
            raise InputError(
                f"evaluate: {plan.home.path} has no policies for this model, preset, tasks, seed and code: "
                f"run `kvp train --preset {plan.config.preset}` with the same options first"
            )
        trained.append(trained_ref(plan.home, found.outputs[output]))
    return trained
