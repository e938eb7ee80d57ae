"""Collecting, training and judging a tiny model, task by task; in pieces and at once it comes to the same."""

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from kvpolicy.collection import CollectConfig, collect_trace
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.policies.agent import AgentConfig
from kvpolicy.policies.policy_set import load_policy
from kvpolicy.training import TrainConfig
from storage.catalog import Catalog
from storage.errors import StorageError
from storage.token_ranks import list_contexts, list_rankings, read_context
from storage.traces import TraceStore
from tasks.collect import collect_fragment, collection_stage, seal_collection
from tasks.evaluate import evaluate_shard, read_costs, read_scores
from tasks.loaded_model import load_model
from tasks.publish import evaluation_stage, publish_curves
from tasks.references import trained_ref
from tasks.samples import read_encoded
from tasks.stage import find_completed
from tasks.train import assemble_policy, train_heads
from tasks.wholeness import is_whole

COLLECT = CollectConfig(num_train_samples=2, num_heldout_samples=1, samples_per_fragment=3)
TRAIN = TrainConfig(agent=AgentConfig(width=8), num_steps=4, num_warmup_steps=1, heldout_every_steps=2)
EVALUATE = EvaluateConfig(
    methods=("kvp", "knorm", "random"),
    budgets=(32, 64, 128),
    num_samples=2,
    num_generated=1,
    max_answer_tokens=4,
    num_random_seeds=2,
    num_resamples=100,
    examples_per_shard=4,
)


@pytest.fixture(scope="module")
def collection(model, prompts):
    return collection_stage(model, (prompts("train", 2), prompts("validation")), COLLECT)


@pytest.fixture(scope="module")
def collected(home, model, prompts, collection):
    """The outcomes of all fragments, and the snapshot."""
    outcomes = [
        collect_fragment.fn(home, model, part, COLLECT, collection=collection.key, first=first)
        for part in (prompts("train", 2), prompts("validation"))
        for first in range(0, part.num_samples, COLLECT.samples_per_fragment)
    ]
    fragments = [outcome.outputs["fragment"] for outcome in outcomes]
    snapshot, _ = seal_collection.fn(home, model, collection, COLLECT, fragments)
    return outcomes, snapshot


@pytest.fixture(scope="module")
def policy(home, model, collected):
    _, snapshot = collected
    groups = [
        train_heads.fn(home, model, snapshot, TRAIN, heads=heads, seed=0).outputs["group"] for heads in ((0, 3), (3, 4))
    ]
    trained, _ = assemble_policy.fn(home, model, snapshot, TRAIN, groups, seed=0)
    return trained


@pytest.fixture(scope="module")
def stage(model, policy, prompts):
    return evaluation_stage(model, [policy], prompts("test", 2), EVALUATE, seed=0)


@pytest.fixture(scope="module")
def judged(home, model, policy, prompts, stage):
    """The shards and the published evaluation."""
    test = prompts("test", 2)
    shard, _ = evaluate_shard.fn(home, model, [policy], test, EVALUATE, first=0, seed=0)
    evaluation, _ = publish_curves.fn(home, model, [policy], test, stage, config=EVALUATE, shards=[shard])
    return [shard], evaluation


def test_traces_are_what_the_model_left(home, model, prompts, collection, collected):
    _, snapshot = collected
    store = TraceStore(home.traces)
    rows = {row.sample_id: row for row in store.snapshot(snapshot.collection).rows}
    examples = read_encoded(prompts("train", 2), model) + read_encoded(prompts("validation"), model)
    assert set(rows) == {example.sample.sample_id for example in examples}
    for example in examples:
        trace = collect_trace(load_model(model), example, COLLECT.setting)
        stored = store.read(rows[example.sample.sample_id], slice(None))
        for name in ("keys", "values", "importance"):
            torch.testing.assert_close(getattr(stored, name), getattr(trace, name))
        assert rows[example.sample.sample_id].collection == collection.key
    assert store.verify() == []


def test_collecting_again_finds_the_fragments_and_the_snapshot(home, model, prompts, collection, collected):
    outcomes, snapshot = collected
    assert not any(outcome.skipped for outcome in outcomes)
    again = collect_fragment.fn(home, model, prompts("train", 2), COLLECT, collection=collection.key, first=3)
    assert again.skipped
    assert again.outputs == outcomes[1].outputs
    fragments = [outcome.outputs["fragment"] for outcome in outcomes]
    sealed, outcome = seal_collection.fn(home, model, collection, COLLECT, fragments)
    assert (sealed, outcome.skipped) == (snapshot, True)
    assert len(Catalog(home).rows("samples", f"collection = '{collection.key}'")) == 6


def test_a_lost_fragment_is_collected_again_and_the_snapshot_is_whole(home, model, prompts, collection, collected):
    outcomes, snapshot = collected
    lost = Catalog(home).artifact(outcomes[1].outputs["fragment"])
    shutil.rmtree(lost.uri)
    assert find_completed(home, collection) is None  # its snapshot is no more than a list of fragments
    again = collect_fragment.fn(home, model, prompts("train", 2), COLLECT, collection=collection.key, first=3)
    assert (again.skipped, again.outputs) == (False, outcomes[1].outputs)
    assert find_completed(home, collection) is not None
    fragments = [outcome.outputs["fragment"] for outcome in outcomes]
    assert seal_collection.fn(home, model, collection, COLLECT, fragments)[0] == snapshot
    assert TraceStore(home.traces).verify() == []


def test_another_setting_or_seed_is_another_collection(model, prompts, collection):
    parts = (prompts("train", 2), prompts("validation"))
    aware = dataclasses.replace(COLLECT, setting="query_aware")
    others = [
        collection_stage(model, parts, aware).key,
        collection_stage(model, (prompts("train", 2, seed=1), parts[1]), COLLECT).key,
        collection_stage(dataclasses.replace(model, dtype="bfloat16"), parts, COLLECT).key,
    ]
    assert len({collection.key, *others}) == 4


def test_groups_join_in_the_order_of_their_heads(home, model, policy):
    joined = load_policy(Path(policy.path))
    joined.require_model(model.digest)
    assert joined.spec.num_heads == joined.agents.num_heads == model.num_heads == 4
    groups = Catalog(home).rows("artifacts", "kind = 'head_group'")
    costs = [cost for group in groups for cost in Catalog(home).artifact(group["artifact_id"]).metadata["heldout_cost"]]
    heads = sorted(Catalog(home).rows("heads"), key=lambda row: row["head"])
    assert [row["heldout_cost"] for row in heads] == costs
    assert [row["head_name"] for row in heads] == ["L00.H0", "L00.H1", "L01.H0", "L01.H1"]
    assert all(row["policy_set_id"] == policy.artifact_id for row in heads)
    parts = [load_policy(Path(Catalog(home).artifact(group["artifact_id"]).uri)).agents for group in groups]
    for name, weights in joined.agents.state_dict().items():
        torch.testing.assert_close(weights, torch.cat([part.state_dict()[name] for part in parts]))


def test_training_leaves_its_curves_as_means_over_heads(home, policy):
    points = {}
    for row in Catalog(home).rows("metrics", f"policy_set_id = '{policy.artifact_id}'"):
        points.setdefault(row["name"], {})[row["step"]] = row["value"]
    every = [1, 2, 3, 4]
    names = ("loss", "gradient_norm", "learning_rate", "heldout_cost", "seconds")
    assert {name: sorted(own) for name, own in points.items()} == dict.fromkeys(names, every) | {"heldout_cost": [2, 4]}
    heads = [row["heldout_cost"] for row in Catalog(home).rows("heads")]  # of groups of three and of one
    assert points["heldout_cost"][4] == pytest.approx(sum(heads) / len(heads))
    assert all(points["seconds"][step] < points["seconds"][step + 1] for step in every[:-1])


def test_training_again_gives_the_same_policy(home, model, collected, policy, tmp_path_factory):
    _, snapshot = collected
    again = train_heads.fn(home, model, snapshot, TRAIN, heads=(0, 3), seed=0)
    assert again.skipped
    other = train_heads.fn(home, model, snapshot, TRAIN, heads=(0, 3), seed=1)
    assert not other.skipped
    assert other.outputs != again.outputs
    assert trained_ref(home, policy.artifact_id) == policy


def test_shards_judge_what_one_shard_does(home, model, policy, prompts, judged):
    shards, _ = judged
    test = prompts("test", 2)
    smaller = dataclasses.replace(EVALUATE, examples_per_shard=3)
    parts = [evaluate_shard.fn(home, model, [policy], test, smaller, first=first, seed=0)[0] for first in (0, 3)]
    key = lambda row: (row["sample_id"], row["setting"], row["method"], row["seed"])  # noqa: E731  # used twice, right below
    assert [vars(score) for score in read_scores(parts)] == [vars(score) for score in read_scores(shards)]
    assert sorted(read_costs(parts), key=key) == sorted(read_costs(shards), key=key)


def test_every_contender_is_judged_on_every_example(judged):
    scores = read_scores(judged[0])
    seeds = Counter((score.method, score.seed) for score in scores if score.metric == "kl")
    contenders = [("kvp", 0), ("random", 0), ("random", 1), ("knorm", 0), ("full", 0), ("oracle", 0)]
    assert seeds == dict.fromkeys(contenders, 4 * 2 * 3)  # examples, settings, budgets
    answered = {score.sample_id for score in scores if score.metric == "string_match"}
    assert len(answered) == 2


def test_publishing_again_finds_the_same_evaluation(home, model, policy, prompts, stage, judged):
    shards, evaluation = judged
    before = Catalog(home).rows("curves")
    again, outcome = publish_curves.fn(home, model, [policy], prompts("test", 2), stage, config=EVALUATE, shards=shards)
    assert (again, outcome.skipped) == (evaluation, True)
    assert Catalog(home).rows("curves") == before
    assert {row["evaluation_id"] for row in before} == {evaluation.artifact_id}


def test_head_costs_are_means_over_the_examples(home, judged):
    shards, evaluation = judged
    rows = Catalog(home).rows("head_costs", f"evaluation_id = '{evaluation.artifact_id}'")
    assert len(rows) == 5 * 2 * 4  # contenders that rank, settings, heads
    costs = read_costs(shards)
    for row in rows:
        name = (row["setting"], row["method"], row["seed"])
        own = [entry["costs"] for entry in costs if (entry["setting"], entry["method"], entry["seed"]) == name]
        assert row["n"] == len(own) == 4
        assert row["cost"] == pytest.approx(sum(cost[row["head"]] for cost in own) / 4)
        if row["method"] == "oracle":
            assert row["cost"] == pytest.approx(1)


def test_costs_of_heads_in_training_end_with_those_of_the_policy(home, policy):
    rows = Catalog(home).rows("head_curves", f"policy_set_id = '{policy.artifact_id}'")
    assert [(row["step"], row["head"]) for row in rows] == [(step, head) for step in (2, 4) for head in range(4)]
    final = {row["head"]: row["heldout_cost"] for row in Catalog(home).rows("heads")}
    assert {row["head"]: row["heldout_cost"] for row in rows if row["step"] == 4} == final
    means = {row["step"]: row["value"] for row in Catalog(home).rows("metrics", "name = 'heldout_cost'")}
    for step, mean in means.items():
        assert sum(row["heldout_cost"] for row in rows if row["step"] == step) / 4 == pytest.approx(mean)


def test_a_shard_keeps_the_text_and_every_ranking_of_the_first_example_of_each_task(model, prompts, judged):
    folder = Path(judged[0][0].path)
    examples = read_encoded(prompts("test", 2), model)
    first = {example.sample.task: example for example in reversed(examples)}
    assert {row["sample_id"] for row in list_contexts(folder)} == {own.sample.sample_id for own in first.values()}
    example = examples[0]
    own = [row for row in list_contexts(folder) if row["sample_id"] == example.sample.sample_id]
    assert [(row["setting"], row["num_tokens"]) for row in own] == [
        ("query_agnostic", len(example.context_ids)),
        ("query_aware", len(example.context_ids) + len(example.question_ids)),
    ]
    methods = {(row["method"], row["seed"]) for row in list_rankings(folder)}
    assert methods == {("kvp", 0), ("knorm", 0), ("random", 0), ("random", 1), ("oracle", 0)}
    for row in own:
        context = read_context(folder, row["sample_id"], row["setting"], [("oracle", 0)])
        assert example.sample.context in "".join(context.pieces)
        assert (example.sample.question in "".join(context.pieces)) == (row["setting"] == "query_aware")
        (oracle,) = context.rankings
        for ranks, importance in zip(oracle.ranks, context.importance, strict=True):
            worth = importance[4:-16][ranks[4:-16].argsort()]
            assert (worth[:-1] >= worth[1:]).all()


def test_rankings_of_contexts_that_came_in_chunks_are_not_kept(home, model, policy, prompts):
    config = dataclasses.replace(EVALUATE, methods=("kvp", "knorm"), budgets=(64,), num_generated=0, chunk_tokens=64)
    shard, _ = evaluate_shard.fn(home, model, [policy], prompts("test", 2), config, first=0, seed=0)
    assert list_contexts(Path(shard.path)) == []
    assert is_whole(home, Catalog(home).artifact(shard.artifact_id))


@pytest.mark.parametrize("name", ["scores.parquet", "costs.parquet", "contexts.parquet", "rankings.parquet"])
def test_a_shard_without_one_of_its_files_is_not_whole(home, judged, tmp_path, name):
    shard = Catalog(home).artifact(judged[0][0].artifact_id)
    assert is_whole(home, shard)
    copy = dataclasses.replace(shard, uri=str(shutil.copytree(shard.uri, tmp_path / "copy")))
    (tmp_path / "copy" / name).unlink()
    assert not is_whole(home, copy)


def test_the_curve_of_a_policy_goes_back_to_its_traces(home, model, policy, collected, judged):
    _, evaluation = judged
    curve = next(row for row in Catalog(home).rows("curves") if row["method"] == "kvp")
    graph = Catalog(home).lineage(curve["mlflow_run_id"], "up")
    expected = {model.artifact_id, policy.artifact_id, collected[1].artifact_id, *collected[0][0].outputs.values()}
    assert expected <= set(graph.nodes)
    assert evaluation.artifact_id != curve["curve_id"]


def test_a_missing_file_of_scores_is_told_in_one_line(judged, tmp_path):
    gone = dataclasses.replace(judged[0][0], path=str(tmp_path / "gone"))
    with pytest.raises(StorageError, match=r"cannot read .*gone/scores.parquet: [^\n]*; delete what is left of it"):
        read_scores([gone])
