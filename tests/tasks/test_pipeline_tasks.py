"""Collecting, training and judging a tiny model, task by task; in pieces and at once it comes to the same."""

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from kvpolicy.errors import InputError
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.policies.agent import AgentConfig
from kvpolicy.policies.policy_set import load_policy
from kvpolicy.training.collection import CollectConfig, collect_trace
from kvpolicy.training.policy_training import TrainConfig
from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.home import Home
from storage.token_ranks import list_contexts, list_rankings, read_context
from storage.traces.store import TraceStore
from tasks.collect import collect_fragment, collection_stage, seal_collection
from tasks.evaluate import evaluate_shard, read_costs, read_scores
from tasks.framework.references import trained_ref
from tasks.framework.stage import find_completed
from tasks.framework.wholeness import is_whole
from tasks.inputs.loaded_model import load_model
from tasks.inputs.samples import read_encoded
from tasks.publish import EvaluationWork, publish_curves
from tasks.train import assemble_policy, train_heads

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
def work(home, model, policy, prompts):
    given = {"home": home, "model": model, "trained": (policy,), "prompts": prompts("test", 2)}
    return EvaluationWork(**given, config=EVALUATE, seed=0)


@pytest.fixture(scope="module")
def judged(home, work):
    """The shards and the published evaluation."""
    shards = evaluate_shard.fn(home, work.group((0, 4)))
    evaluation, _ = publish_curves.fn(work, shards)
    return shards, evaluation


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


def test_smaller_groups_of_examples_have_the_same_figures(home, work, judged):
    shards, _ = judged
    parts = [shard for examples in ((0, 3), (3, 4)) for shard in evaluate_shard.fn(home, work.group(examples))]
    assert figures(parts) == figures(shards)


def figures(shards):
    """Scores and costs of heads, whatever their order."""
    costs = [tuple(row[name] for name in row if name != "costs") + tuple(row["costs"]) for row in read_costs(shards)]
    return sorted(dataclasses.astuple(score) for score in read_scores(shards)), sorted(costs)


def test_a_method_that_is_added_is_evaluated_alone_to_what_it_comes_to_with_the_others(home, work, judged, tmp_path):
    """In bfloat16, where the last bits depend on what runs together."""
    rounded = dataclasses.replace(work, model=dataclasses.replace(work.model, dtype="bfloat16"))
    some = dataclasses.replace(EVALUATE, methods=("knorm", "random"))
    before = evaluate_shard.fn(home, dataclasses.replace(rounded, config=some).group((0, 4)))
    num_runs = len(Catalog(home).rows("runs", "stage = 'evaluate-shard'"))
    after = evaluate_shard.fn(home, rounded.group((0, 4)))
    new = Catalog(home).rows("runs", "stage = 'evaluate-shard'")[num_runs:]
    assert [json.loads(run["parameters_json"])["method"] for run in new] == ["kvp"]
    assert {shard.artifact_id for shard in before} < {shard.artifact_id for shard in after}
    elsewhere = Home.open(tmp_path / "home")
    for artifact in Catalog(home).artifacts([own.artifact_id for own in (work.model, work.prompts, *work.trained)]):
        Catalog(elsewhere).register(artifact)
    together = evaluate_shard.fn(elsewhere, rounded.group((0, 4)))
    assert figures(together) == figures(after)
    assert [shard.artifact_id for shard in together] == [shard.artifact_id for shard in after]


def test_a_contender_that_fails_leaves_a_failed_run_of_each_that_was_missing(home, work, tmp_path):
    lost = dataclasses.replace(work.trained[0], path=str(tmp_path / "gone"))
    one = dataclasses.replace(work, trained=(lost,), seed=5)
    before = Catalog(home).rows("runs")
    with pytest.raises(InputError):
        evaluate_shard.fn(home, one.group((0, 1)))
    new = [run for run in Catalog(home).rows("runs")[len(before) :] if run["stage"] == "evaluate-shard"]
    assert {run["outcome"] for run in new} == {"failed"}
    assert len(new) == 6


def test_every_contender_is_judged_on_every_example(judged):
    scores = read_scores(judged[0])
    seeds = Counter((score.method, score.seed) for score in scores if score.metric == "kl")
    contenders = [("kvp", 0), ("random", 0), ("random", 1), ("knorm", 0), ("full", 0), ("oracle", 0)]
    assert seeds == dict.fromkeys(contenders, 4 * 2 * 3)  # examples, settings, budgets
    answered = {score.sample_id for score in scores if score.metric == "string_match"}
    assert len(answered) == 2


def test_publishing_again_finds_the_same_evaluation(home, work, judged):
    shards, evaluation = judged
    before = Catalog(home).rows("curves")
    again, outcome = publish_curves.fn(work, shards)
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
    folders = {shard.role.partition(" ")[2]: Path(shard.path) for shard in judged[0]}
    folder = folders["oracle 0"]
    assert not any(list_contexts(other) for name, other in folders.items() if name != "oracle 0")
    examples = read_encoded(prompts("test", 2), model)
    first = {example.sample.task: example for example in reversed(examples)}
    assert {row["sample_id"] for row in list_contexts(folder)} == {own.sample.sample_id for own in first.values()}
    example = examples[0]
    own = [row for row in list_contexts(folder) if row["sample_id"] == example.sample.sample_id]
    assert [(row["setting"], row["num_tokens"]) for row in own] == [
        ("query_agnostic", len(example.context_ids)),
        ("query_aware", len(example.context_ids) + len(example.question_ids)),
    ]
    for name, other in folders.items():
        assert {f"{row['method']} {row['seed']}" for row in list_rankings(other)} == (
            {name} if name != "full 0" else set()
        )
    for row in own:
        context = read_context(folder, row["sample_id"], row["setting"], {("oracle", 0): folder})
        assert example.sample.context in "".join(context.pieces)
        assert (example.sample.question in "".join(context.pieces)) == (row["setting"] == "query_aware")
        (oracle,) = context.rankings
        for ranks, importance in zip(oracle.ranks, context.importance, strict=True):
            worth = importance[4:-16][ranks[4:-16].argsort()]
            assert (worth[:-1] >= worth[1:]).all()


def test_rankings_of_contexts_that_came_in_chunks_are_not_kept(home, work):
    config = dataclasses.replace(EVALUATE, methods=("kvp", "knorm"), budgets=(64,), num_generated=0, chunk_tokens=64)
    for shard in evaluate_shard.fn(home, dataclasses.replace(work, config=config).group((0, 4))):
        assert list_contexts(Path(shard.path)) == list_rankings(Path(shard.path)) == []
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
