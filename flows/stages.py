"""The stages that have parts: all the parts, one after the other, and what they come to. Wiring only.

The pipeline and repetitions run the same; `tasks.purpose` says which of them it is.
"""

from collections.abc import Sequence

from kvpolicy.collection import CollectConfig
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.training import TrainConfig
from storage.home import Home
from tasks.analyse import analyse_shard
from tasks.collect import collect_fragment, collection_stage, seal_collection
from tasks.evaluate import evaluate_shard
from tasks.publish import evaluation_stage, publish_curves
from tasks.references import EvaluationRef, ModelRef, PromptsRef, SnapshotRef, TrainedRef
from tasks.stage import StageOutcome, find_completed
from tasks.train import assemble_policy, train_heads, training_stage


def run_collection(
    home: Home, model: ModelRef, prompts: Sequence[PromptsRef], config: CollectConfig
) -> tuple[SnapshotRef, StageOutcome]:
    """Collect the traces of prompt sets, fragment by fragment, and take their snapshot."""
    stage = collection_stage(model, prompts, config)
    fragments: list[str] = []
    if find_completed(home, stage) is None:
        for part in prompts:
            for first in range(0, part.num_samples, config.samples_per_fragment):
                outcome = collect_fragment(home, model, part, config, collection=stage.key, first=first)
                fragments.extend(outcome.outputs.values())
    sealed: tuple[SnapshotRef, StageOutcome] = seal_collection(home, model, stage, config, fragments)
    return sealed


def run_training(
    home: Home, model: ModelRef, snapshot: SnapshotRef, config: TrainConfig, *, seed: int
) -> tuple[TrainedRef, StageOutcome]:
    """Train every head, group by group, and join the groups into a policy set."""
    groups: list[str] = []
    if find_completed(home, training_stage(model, snapshot, config, seed=seed)) is None:
        size = config.heads_per_group or model.num_heads
        for first in range(0, model.num_heads, size):
            heads = (first, min(first + size, model.num_heads))
            outcome = train_heads(home, model, snapshot, config, heads=heads, seed=seed)
            groups.append(outcome.outputs["group"])
    joined: tuple[TrainedRef, StageOutcome] = assemble_policy(home, model, snapshot, config, groups, seed=seed)
    return joined


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
        for first in range(0, prompts.num_samples, config.examples_per_shard):
            shard, _ = evaluate_shard(home, model, trained, prompts, config, first=first, seed=seed)
            shards.append(shard)
        # Prompts lie task by task in turn, so the first of every task are the first of all.
        num_analysed = prompts.num_samples * config.num_analysed // config.num_samples
        for first in range(0, num_analysed, config.examples_per_shard):
            part = (first, min(first + config.examples_per_shard, num_analysed))
            shard, _ = analyse_shard(home, model, trained, prompts, config, examples=part, seed=seed)
            analyses.append(shard)
    published: tuple[EvaluationRef, StageOutcome] = publish_curves(
        home, model, trained, prompts, stage, config=config, shards=shards, analyses=analyses
    )
    return published
