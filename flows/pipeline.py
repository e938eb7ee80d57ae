"""The flows: collect, train and evaluate, and `retrain`, which chains them. Wiring only.

Each flow may run alone: what it needs from earlier stages is found again in the catalog by stage key. References
travel, tensors do not.
"""

import time
from dataclasses import dataclass

from prefect import flow

from flows.figures import draw_figures
from flows.options import Choices, Preset
from flows.plan import Plan, make_plan
from kvpolicy.errors import InputError
from kvpolicy.models.reference import EMBEDDED
from tasks.collect import collect_fragment, seal_collection, snapshot_ref
from tasks.evaluate import evaluate_shard
from tasks.publish import evaluation_stage, publish_curves
from tasks.references import PolicyRef, SnapshotRef
from tasks.stage import find_completed
from tasks.train import assemble_policy, policy_ref, train_heads, training_stage

NO_CHOICES = Choices()


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """How a stage went.

    Attributes:
        artifact_id: What it made, or found again.
        run_id: The run that made it; empty for what no stage makes.
        seconds: That it took now.
        skipped: Whether its result was there already.
    """

    artifact_id: str
    run_id: str
    seconds: float
    skipped: bool


@flow(name="collect")
def collect(
    preset: Preset = "demo",
    model: str = EMBEDDED,
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
) -> StageReport:
    """Run a model over generated prompts; keys, values and importance go into the trace store."""
    plan = make_plan(preset=preset, model=model, home=home, seed=seed, choices=choices)
    started = time.monotonic()
    stage, config = plan.collection, plan.config.collect
    fragments: list[str] = []
    if find_completed(plan.home, stage) is None:
        for prompts in (plan.train_prompts, plan.heldout_prompts):
            for first in range(0, prompts.num_samples, config.samples_per_fragment):
                outcome = collect_fragment(plan.home, plan.model, prompts, config, collection=stage.key, first=first)
                fragments.append(outcome.outputs["fragment"])
    snapshot, outcome = seal_collection(plan.home, plan.model, stage, config, fragments)
    return StageReport(
        artifact_id=snapshot.artifact_id,
        run_id=outcome.run_id,
        seconds=time.monotonic() - started,
        skipped=outcome.skipped,
    )


@flow(name="train")
def train(
    preset: Preset = "demo",
    model: str = EMBEDDED,
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
) -> StageReport:
    """Train one policy per KV head on the collected traces."""
    plan = make_plan(preset=preset, model=model, home=home, seed=seed, choices=choices)
    started = time.monotonic()
    snapshot, config = find_snapshot(plan), plan.config.train
    groups: list[str] = []
    if find_completed(plan.home, training_stage(plan.model, snapshot, config, seed=seed)) is None:
        num_heads = plan.model.num_heads
        size = config.heads_per_group or num_heads
        for first in range(0, num_heads, size):
            heads = (first, min(first + size, num_heads))
            outcome = train_heads(plan.home, plan.model, snapshot, config, heads=heads, seed=seed)
            groups.append(outcome.outputs["group"])
    policy, outcome = assemble_policy(plan.home, plan.model, snapshot, config, groups, seed=seed)
    return StageReport(
        artifact_id=policy.artifact_id,
        run_id=outcome.run_id,
        seconds=time.monotonic() - started,
        skipped=outcome.skipped,
    )


@flow(name="evaluate")
def evaluate(
    preset: Preset = "demo",
    model: str = EMBEDDED,
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
) -> StageReport:
    """Judge the policies and every heuristic on held-out prompts; curves go into MLflow and the catalog."""
    plan = make_plan(preset=preset, model=model, home=home, seed=seed, choices=choices)
    started = time.monotonic()
    config, prompts = plan.config.evaluate, plan.test_prompts
    policies = [find_policy(plan)] if "kvp" in config.methods else []
    stage = evaluation_stage(plan.model, policies, prompts, config, benchmark=plan.config.prompts.benchmark, seed=seed)
    shards = []
    if find_completed(plan.home, stage) is None:
        for first in range(0, prompts.num_samples, config.examples_per_shard):
            shard, _ = evaluate_shard(plan.home, plan.model, policies, prompts, config, first=first, seed=seed)
            shards.append(shard)
    evaluation, outcome = publish_curves(plan.home, plan.model, policies, prompts, stage, config=config, shards=shards)
    draw_figures(plan.home, evaluation)
    return StageReport(
        artifact_id=evaluation.artifact_id,
        run_id=outcome.run_id,
        seconds=time.monotonic() - started,
        skipped=outcome.skipped,
    )


@flow(name="retrain")
def retrain(
    preset: Preset = "demo",
    model: str = EMBEDDED,
    home: str | None = None,
    seed: int = 0,
    choices: Choices = NO_CHOICES,
) -> dict[str, StageReport]:
    """Collect, train and evaluate, one after the other; what is there already is not done again."""
    started = time.monotonic()
    plan = make_plan(preset=preset, model=model, home=home, seed=seed, choices=choices)
    prepared = StageReport(
        artifact_id=plan.model.artifact_id, run_id="", seconds=time.monotonic() - started, skipped=False
    )
    options = {"preset": preset, "model": model, "home": home, "seed": seed, "choices": choices}
    return {
        "prepare": prepared,
        "collect": collect(**options),
        "train": train(**options),
        "evaluate": evaluate(**options),
    }


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


def find_policy(plan: Plan) -> PolicyRef:
    """The policy set that an evaluation of this plan judges.

    Raises:
        InputError: If it was not trained.
    """
    snapshot = find_snapshot(plan)
    stage = training_stage(plan.model, snapshot, plan.config.train, seed=plan.seed)
    found = find_completed(plan.home, stage)
    if found is None:
        raise InputError(
            f"evaluate: {plan.home.path} has no policies for this model, preset, tasks, seed and code: "
            f"run `kvp train --preset {plan.config.preset}` with the same options first"
        )
    return policy_ref(plan.home, found.outputs["policy"])
