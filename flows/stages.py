"""The stages that have parts: all the parts, and what they come to. Wiring only.

The pipeline and repetitions run the same; `tasks.purpose` says which of them it is, `flows.fan_out` where parts run.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from flows.fan_out import run_parts
from flows.gpu_share import training_bytes
from kvpolicy.collection import CollectConfig
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.training import TrainConfig
from storage.home import Home
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
            for part in prompts
            for first in range(0, part.num_samples, config.samples_per_fragment)
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
    size = config.heads_per_group or model.num_heads
    groups: dict[int, list[str]] = {own: [] for own in seeds}
    parts = {
        (own, first): partial(
            train_heads,
            home,
            model,
            snapshot,
            config,
            heads=(first, min(first + size, model.num_heads)),
            seed=own,
        )
        for own in groups
        if find_completed(home, training_stage(model, snapshot, config, seed=own)) is None
        for first in range(0, model.num_heads, size)
    }

    def gpu_bytes() -> int:
        longest = max(row.context_tokens for row in snapshot_rows(TraceStore(home.traces), snapshot))
        head_dim = model_spec(home, model).head_dim
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
        size, judged = config.examples_per_shard, (home, model, trained, prompts, config)
        shard_parts = [
            partial(evaluate_shard, *judged, first=first, seed=seed) for first in range(0, prompts.num_samples, size)
        ]
        # Prompts lie task by task in turn, so the first of every task are the first of all.
        num_analysed = prompts.num_samples * config.num_analysed // config.num_samples
        analysis_parts = [
            partial(analyse_shard, *judged, examples=(first, min(first + size, num_analysed)), seed=seed)
            for first in range(0, num_analysed, size)
        ]
        references = [reference for reference, _ in run_parts("evaluate", [*shard_parts, *analysis_parts])]
        shards, analyses = references[: len(shard_parts)], references[len(shard_parts) :]
    published: tuple[EvaluationRef, StageOutcome] = publish_curves(
        home, model, trained, prompts, stage, config=config, shards=shards, analyses=analyses
    )
    return published
