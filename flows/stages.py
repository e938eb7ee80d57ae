"""The stages that have parts: all the parts, and what they come to. Wiring only.

The pipeline and repetitions run the same; `tasks.purpose` says which of them it is, `flows.fan_out` where parts run.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from flows.fan_out import run_parts
from flows.gpu_share import training_bytes
from flows.plan import Plan
from flows.run_progress import StageProgress
from kvpolicy.collection import CollectConfig
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.training import TrainConfig
from storage.catalog import Catalog
from storage.home import Home
from storage.requests import mean_seconds
from storage.traces import TraceStore
from tasks.analyse import analyse_shard
from tasks.collect import collect_fragment, collection_stage, seal_collection
from tasks.evaluate import evaluate_shard
from tasks.model import model_spec
from tasks.publish import evaluation_stage, publish_curves
from tasks.references import EvaluationRef, ModelRef, PromptsRef, SnapshotRef, TrainedRef
from tasks.stage import StageOutcome, find_completed
from tasks.traces import snapshot_rows
from tasks.train import assemble_policy, train_heads, training_stage


def run_collection(
    home: Home, model: ModelRef, prompts: Sequence[PromptsRef], config: CollectConfig
) -> tuple[SnapshotRef, StageOutcome]:
    """Collect the traces of prompt sets, fragment by fragment, and take their snapshot."""
    stage = collection_stage(model, prompts, config)
    fragments: list[str] = []
    if find_completed(home, stage) is None:
        parts = [
            partial(collect_fragment, home, model, part, config, collection=stage.key, first=first)
            for part, first in _fragments(prompts, config)
        ]
        fragments = [name for outcome in run_parts("collect", parts) for name in outcome.outputs.values()]
    sealed: tuple[SnapshotRef, StageOutcome] = seal_collection(home, model, stage, config, fragments)
    return sealed


def run_trainings(
    home: Home, model: ModelRef, snapshot: SnapshotRef, config: TrainConfig, *, seeds: Iterable[int]
) -> list[tuple[TrainedRef, StageOutcome]]:
    """Train every head with every seed, group by group, and join the groups of each seed into a policy set.

    The groups are the configuration's under every runner: another grouping would give other agents.
    """
    groups: dict[int, list[str]] = {own: [] for own in seeds}
    parts = {
        (own, heads): partial(
            train_heads,
            home,
            model,
            snapshot,
            config,
            heads=heads,
            seed=own,
        )
        for own in groups
        if find_completed(home, training_stage(model, snapshot, config, seed=own)) is None
        for heads in _groups(model, config)
    }

    def gpu_bytes() -> int:
        longest = max(row.context_tokens for row in snapshot_rows(TraceStore(home.traces), snapshot))
        head_dim = model_spec(home, model).head_dim
        size = config.heads_per_group or model.num_heads
        return training_bytes(config, num_heads=size, head_dim=head_dim, longest_tokens=longest)

    outcomes = run_parts("train", list(parts.values()), gpu_bytes=gpu_bytes)
    for (own, _), outcome in zip(parts, outcomes, strict=True):
        groups[own].append(outcome.outputs["group"])
    return [assemble_policy(home, model, snapshot, config, trained, seed=own) for own, trained in groups.items()]


def run_evaluation(
    home: Home,
    model: ModelRef,
    trained: Sequence[TrainedRef],
    prompts: PromptsRef,
    config: EvaluateConfig,
    *,
    seed: int,
) -> tuple[EvaluationRef, StageOutcome]:
    """Judge all examples, shard by shard, and publish the curves."""
    stage = evaluation_stage(model, trained, prompts, config, seed=seed)
    shards, analyses = [], []
    if find_completed(home, stage) is None:
        judged = (home, model, trained, prompts, config)
        shard_parts = [
            partial(evaluate_shard, *judged, first=first, seed=seed) for first, _ in evaluation_shards(prompts, config)
        ]
        analysis_parts = [
            partial(analyse_shard, *judged, examples=examples, seed=seed) for examples in _analysed(prompts, config)
        ]
        references = [reference for reference, _ in run_parts("evaluate", [*shard_parts, *analysis_parts])]
        shards, analyses = references[: len(shard_parts)], references[len(shard_parts) :]
    published: tuple[EvaluationRef, StageOutcome] = publish_curves(
        home, model, trained, prompts, stage, config=config, shards=shards, analyses=analyses
    )
    return published


def expected_parts(plan: Plan) -> dict[str, StageProgress]:
    """The stages of a plan that have parts, with what their parts took in earlier runs of the preset in this home."""
    config = plan.config
    counts = {
        "collect": ("collect-fragment", len(_fragments((plan.train_prompts, plan.heldout_prompts), config.collect))),
        "train": ("train-heads", len(_groups(plan.model, config.train)) * len(plan.policy_seeds)),
        "train soft tokens": ("train-soft-tokens", len(plan.policy_seeds) * plan.needs("soft_tokens")),
        "evaluate": (
            "evaluate-shard",
            len(evaluation_shards(plan.test_prompts, config.evaluate))
            + len(_analysed(plan.test_prompts, config.evaluate)),
        ),
    }
    took = mean_seconds(Catalog(plan.home), config.preset)
    return {
        name: StageProgress(total=total, part_s=took.get(stage)) for name, (stage, total) in counts.items() if total
    }


def _fragments(prompts: Sequence[PromptsRef], config: CollectConfig) -> list[tuple[PromptsRef, int]]:
    return [(part, first) for part in prompts for first in range(0, part.num_samples, config.samples_per_fragment)]


def _groups(model: ModelRef, config: TrainConfig) -> list[tuple[int, int]]:
    return _slices(model.num_heads, config.heads_per_group or model.num_heads)


def evaluation_shards(prompts: PromptsRef, config: EvaluateConfig) -> list[tuple[int, int]]:
    """First and last, exclusive, of the examples of each shard."""
    return _slices(prompts.num_samples, config.examples_per_shard)


def _analysed(prompts: PromptsRef, config: EvaluateConfig) -> list[tuple[int, int]]:
    # Prompts lie task by task in turn, so the first of every task are the first of all.
    return _slices(prompts.num_samples * config.num_analysed // config.num_samples, config.examples_per_shard)


def _slices(count: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(first + size, count)) for first in range(0, count, size)]
