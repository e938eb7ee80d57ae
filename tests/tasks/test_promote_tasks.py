"""Champion and challenger of a tiny model, in a real catalog and MLflow's own registry."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from kvpolicy.digests import digest_json
from kvpolicy.errors import InputError
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.names import CHAMPION
from kvpolicy.policies.agent import AgentConfig
from kvpolicy.results.promotion import PromoteConfig, decide_promotion
from kvpolicy.results.statistics import Bootstrap
from kvpolicy.training.collection import CollectConfig
from kvpolicy.training.policy_training import TrainConfig
from storage.catalog.catalog import Artifact, Catalog
from storage.catalog.promotions import read_history
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.tracking import CHALLENGER, Tracking
from storage.tables.parquet import write_rows
from tasks.collect import collect_fragment, collection_stage, seal_collection
from tasks.evaluate import SCORES, evaluate_shard, read_scores
from tasks.framework.references import ShardRef
from tasks.promote import (
    champion_config,
    decide_on_challenger,
    follow_decisions,
    present_champion,
    promote_by_hand,
    require_whole,
    roll_back,
)
from tasks.publish import EvaluationWork, evaluated_examples, publish_curves
from tasks.registration import ensure_registered
from tasks.train import assemble_policy, train_heads

COLLECT = CollectConfig(num_train_samples=1, num_heldout_samples=1)
JUDGED = EvaluateConfig(
    methods=("kvp", "knorm"),
    budgets=(32, 64),
    num_samples=3,
    num_generated=0,
    num_resamples=200,
    examples_per_shard=4,
)
PROMOTE = PromoteConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """A policy set with its evaluation and the scores that this is made of."""

    policy: object
    evaluation: object
    shards: list


@pytest.fixture(scope="module")
def snapshot(home, model, prompts):
    parts = (prompts("train"), prompts("validation"))
    stage = collection_stage(model, parts, COLLECT)
    made = [collect_fragment.fn(home, model, part, COLLECT, collection=stage.key, first=0) for part in parts]
    return seal_collection.fn(home, model, stage, COLLECT, [outcome.outputs["fragment"] for outcome in made])[0]


@pytest.fixture(scope="module")
def work_of(home, model, prompts):
    """The evaluation of one policy set on the prompts of a seed: `work_of(policy, JUDGED, seed=0)`."""

    def work(policy, config, *, seed):
        given = {"home": home, "model": model, "trained": (policy,), "prompts": prompts("test", 3, seed=seed)}
        return EvaluationWork(**given, config=config, seed=seed)

    return work


@pytest.fixture(scope="module")
def judge(home, prompts, work_of):
    """Evaluates one policy set on the prompts of a seed: `judge(policy, JUDGED, seed=0)`."""

    def shards_of(policy, config, *, seed):
        test = prompts("test", 3, seed=seed)
        return [
            shard
            for examples in evaluated_examples(test, config)
            for shard in evaluate_shard.fn(home, work_of(policy, config, seed=seed).group(examples))
        ]

    return shards_of


@pytest.fixture(scope="module")
def trained(home, model, snapshot, judge, work_of):
    """Two policy sets, each with an evaluation on prompts of its own seed."""
    found = []
    for seed, steps in ((0, 2), (1, 40)):
        config = TrainConfig(agent=AgentConfig(width=8), num_steps=steps, num_warmup_steps=1, heldout_every_steps=steps)
        group = train_heads.fn(home, model, snapshot, config, heads=(0, 4), seed=seed).outputs["group"]
        policy, _ = assemble_policy.fn(home, model, snapshot, config, [group], seed=seed)
        shards = judge(policy, JUDGED, seed=seed)
        evaluation, _ = publish_curves.fn(work_of(policy, JUDGED, seed=seed), shards)
        found.append(Judged(policy=policy, evaluation=evaluation, shards=shards))
    return found


@pytest.fixture(scope="module")
def champion_shards(trained, judge):
    """Seed to the first policy set's scores on the prompts of that seed, as a champion is judged."""
    return {seed: judge(trained[0].policy, champion_config(JUDGED), seed=seed) for seed in (0, 1)}


@pytest.fixture
def copied(home, trained, champion_shards, tmp_path):
    """A home of the test's own, where nothing is decided yet."""
    del trained, champion_shards  # what is copied has them
    return Home.open(shutil.copytree(home.path, tmp_path / "home"))


def decide(home, model, judged, *, champion=None, shards=(), config=PROMOTE, evaluate=JUDGED):
    return decide_on_challenger.fn(
        home,
        model,
        judged.policy,
        evaluation_id=judged.evaluation.artifact_id,
        evaluation_run_id=judged.evaluation.run_id,
        champion=None if champion is None else champion.policy,
        champion_shards=shards,
        config=config,
        evaluated=evaluate,
        seed=judged.policy.seed,
    )


def history_of(home, model):
    return read_history(Catalog(home), model.digest)


def aliased(home, policy):
    """What MLflow's aliases point at: champion, challenger."""
    return tuple(Tracking(home).policy_with_alias(alias, beside=policy.artifact_id) for alias in (CHAMPION, CHALLENGER))


def shard_of(home, scores):
    """Scores that are made up, as a champion's shard."""
    rows = [dataclasses.asdict(score) for score in scores]
    folder = home.evaluations / "made-up"
    write_rows(folder / SCORES, rows)
    made = Artifact(kind="evaluation_shard", digest=digest_json(rows), name="made up", uri=str(folder))
    return ShardRef(artifact_id=Catalog(home).register(made), path=str(folder), role="shard_0000 kvp 0")


def test_the_first_one_is_champion_and_aliases_follow(copied, model, trained):
    first, _ = trained
    assert present_champion(copied, model.digest, beside=first.policy.artifact_id) == ""
    assert aliased(copied, first.policy) == ("", "")
    decide(copied, model, first)
    (row,) = history_of(copied, model).rows
    assert (row["decision"], row["reason"]) == ("promoted", "there was no champion yet")
    assert (row["champion_id"], row["champion_before_id"]) == (first.policy.artifact_id, "")
    assert row["difference"] is row["n"] is row["worst_budget"] is None
    assert follow_decisions(copied, history_of(copied, model))
    assert aliased(copied, first.policy) == (first.policy.artifact_id,) * 2
    assert not follow_decisions(copied, history_of(copied, model))


def test_a_challenger_meets_the_champion_on_its_own_examples(copied, model, trained, champion_shards):
    first, second = trained
    decide(copied, model, first)
    shards = champion_shards[1]
    outcome = decide(copied, model, second, champion=first, shards=shards)

    def scores(of, method="kvp"):
        wanted = (method, "kl", "query_agnostic")
        return [score for score in read_scores(of) if (score.method, score.metric, score.setting) == wanted]

    bootstrap = Bootstrap(seed=1, num_resamples=200, confidence=JUDGED.confidence)
    expected = decide_promotion(scores(second.shards), scores(shards), PROMOTE, bootstrap)
    row = history_of(copied, model).rows[-1]
    assert row["run_id"] == outcome.run_id
    assert (row["decision"] == "promoted", row["reason"]) == (expected.promoted, expected.reason)
    assert (row["difference"], row["n"]) == (expected.difference.mean, 6)
    assert (row["ci_low"], row["ci_high"]) == expected.difference.ends
    assert (row["worst_budget"], row["worst_change"]) == (expected.worst_budget, expected.worst_change)
    assert (row["margin"], row["setting"]) == (0.05, "query_agnostic")
    assert row["evaluation_id"] == second.evaluation.artifact_id
    assert {score.sample_id for score in scores(shards)} == {score.sample_id for score in scores(second.shards)}
    expected_champion = second if expected.promoted else first
    assert row["champion_id"] == expected_champion.policy.artifact_id

    graph = Catalog(copied).lineage(outcome.run_id, "up")
    read = {edge.name: edge.source for edge in graph.edges if edge.target == outcome.run_id}
    assert read["challenger"] == second.policy.artifact_id
    assert read["champion"] == first.policy.artifact_id
    assert read["evaluation"] == second.evaluation.artifact_id
    assert [read[f"champion_shard_{index:04d}"] for index in range(len(shards))] == [
        shard.artifact_id for shard in shards
    ]
    assert outcome.run_id in Catalog(copied).lineage(first.policy.artifact_id, "down").nodes


def test_what_the_champion_is_judged_on_scores_as_its_own_evaluation_does(trained, champion_shards):
    """On the same prompts, alone and without answers, it comes to the same KL."""
    first, _ = trained
    alone = champion_shards[0]

    def values(of):
        return {
            (score.sample_id, score.budget): score.value
            for score in read_scores(of)
            if (score.method, score.metric, score.setting) == ("kvp", "kl", "query_agnostic")
        }

    assert values(alone) == pytest.approx(values(first.shards), abs=1e-5)
    assert {score.setting for score in read_scores(alone)} == {"query_agnostic"}
    assert {score.method for score in read_scores(alone)} == {"kvp", "full", "oracle"}


def test_one_that_is_better_on_the_same_examples_becomes_champion(copied, model, trained):
    first, second = trained
    decide(copied, model, first)
    rows = [dataclasses.replace(score, value=score.value + 1) for score in read_scores(second.shards)]
    shards = [shard_of(copied, rows)]
    decide(copied, model, second, champion=first, shards=shards)
    row = history_of(copied, model).rows[-1]
    assert (row["decision"], row["difference"]) == ("promoted", pytest.approx(-1))
    assert row["champion_id"] == second.policy.artifact_id
    follow_decisions(copied, history_of(copied, model))
    assert aliased(copied, first.policy) == (second.policy.artifact_id,) * 2
    (found,) = Catalog(copied).sql("SELECT champion_id FROM champions").to_pylist()
    assert found["champion_id"] == second.policy.artifact_id


def test_one_that_is_the_same_stays_challenger(copied, model, trained):
    first, second = trained
    decide(copied, model, first)
    shards = [shard_of(copied, read_scores(second.shards))]
    decide(copied, model, second, champion=first, shards=shards)
    assert history_of(copied, model).rows[-1]["reason"].startswith("undecided: ")
    follow_decisions(copied, history_of(copied, model))
    assert aliased(copied, first.policy) == (first.policy.artifact_id, second.policy.artifact_id)


def test_a_run_that_was_killed_after_the_decision_ends_the_same(copied, model, trained):
    """After the commit and before any alias: started again it decides nothing twice, and the aliases move."""
    first, _ = trained
    before = decide(copied, model, first)
    assert aliased(copied, first.policy) == ("", "")
    again = decide(copied, model, first)
    assert (again.skipped, again.run_id) == (True, before.run_id)
    history = history_of(copied, model)
    assert len(history.rows) == 1
    assert history.decision_on(first.policy.artifact_id, first.evaluation.artifact_id)["run_id"] == before.run_id
    follow_decisions(copied, history)
    assert aliased(copied, first.policy) == (first.policy.artifact_id,) * 2


def test_a_decision_that_fails_leaves_a_failed_run_and_no_row(copied, model, trained, champion_shards):
    first, second = trained
    decide(copied, model, first)
    other = champion_shards[0]  # prompts that the challenger was not judged on
    with pytest.raises(InputError, match="12 and 12 scores, 0 in common"):
        decide(copied, model, second, champion=first, shards=other)
    assert len(history_of(copied, model).rows) == 1
    assert Catalog(copied).rows("runs")[-1]["outcome"] == "failed"


def test_by_hand_and_back_again(copied, model, trained):
    first, second = (judged.policy for judged in trained)
    row = promote_by_hand(copied, first.artifact_id, reason="I want it")
    assert (row["kind"], row["reason"], row["champion_before_id"]) == ("manual", "I want it", "")
    with pytest.raises(InputError, match=f"nothing to roll back to: {first.artifact_id} is the only champion"):
        roll_back(copied, model.digest, reason="")
    row = promote_by_hand(copied, second.artifact_id, reason="no, this")
    assert (row["champion_before_id"], row["champion_id"]) == (first.artifact_id, second.artifact_id)
    assert aliased(copied, first)[0] == second.artifact_id
    assert promote_by_hand(copied, second.artifact_id, reason="again") == row
    assert len(history_of(copied, model).rows) == 2
    row = roll_back(copied, model.digest, reason="it was worse")
    assert (row["kind"], row["reason"]) == ("rollback", "it was worse")
    assert (row["champion_before_id"], row["champion_id"]) == (second.artifact_id, first.artifact_id)
    assert aliased(copied, first)[0] == first.artifact_id
    with pytest.raises(InputError, match="nothing to roll back to"):
        roll_back(copied, model.digest, reason="")
    assert promote_by_hand(copied, second.artifact_id, reason="no, this")["kind"] == "manual"  # the same once more
    assert len(history_of(copied, model).rows) == 4
    runs = Catalog(copied).rows("runs", "stage = 'promote' AND outcome = 'completed'")
    assert len(runs) == 4


def test_a_rollback_that_was_killed_before_the_alias_moved_is_ended_and_not_made_twice(copied, model, trained):
    first, second = (judged.policy for judged in trained)
    for name in (first, second, first):
        promote_by_hand(copied, name.artifact_id, reason="")
    roll_back(copied, model.digest, reason="")
    Tracking(copied).move_alias(CHAMPION, first.artifact_id)  # where it was when the command was killed
    row = roll_back(copied, model.digest, reason="")
    assert (row["champion_id"], len(history_of(copied, model).rows)) == (second.artifact_id, 4)
    assert aliased(copied, first)[0] == second.artifact_id
    assert roll_back(copied, model.digest, reason="")["champion_id"] == first.artifact_id


def test_the_champion_of_a_home_without_decisions_is_the_one_with_the_alias(copied, model, trained):
    first, second = (judged.policy for judged in trained)
    Tracking(copied).move_alias(CHAMPION, first.artifact_id)  # as earlier releases left it
    assert present_champion(copied, model.digest, beside=second.artifact_id) == first.artifact_id
    assert present_champion(copied, model.digest, beside=first.artifact_id) == ""
    row = promote_by_hand(copied, second.artifact_id, reason="")
    assert row["champion_before_id"] == first.artifact_id
    assert roll_back(copied, model.digest, reason="")["champion_id"] == first.artifact_id


def test_what_cannot_be_champion_is_refused(copied, model, trained):
    first = trained[0].policy
    with pytest.raises(InputError, match="evaluation-0 is no policy set that was trained in"):
        promote_by_hand(copied, "evaluation-0", reason="")
    folder = Path(Catalog(copied).artifact(first.artifact_id).uri)
    assert folder.is_relative_to(copied.path)
    shutil.rmtree(folder)
    with pytest.raises(InputError, match=f"{first.artifact_id} is lost or damaged at {folder}"):
        promote_by_hand(copied, first.artifact_id, reason="")
    with pytest.raises(InputError, match="lost or damaged"):
        require_whole(copied, first.artifact_id)
    assert history_of(copied, model).rows == []


def test_a_version_that_was_deleted_in_mlflow_is_registered_again_to_be_champion(copied, trained):
    first, second = (judged.policy for judged in trained)
    version = Tracking(copied)._tagged_version(second.artifact_id)
    Tracking(copied)._client.delete_model_version(version.name, version.version)
    assert not Tracking(copied).has_policy(second.artifact_id)
    assert promote_by_hand(copied, second.artifact_id, reason="")["champion_id"] == second.artifact_id
    assert aliased(copied, first)[0] == second.artifact_id


def test_one_that_no_training_made_is_refused(copied):
    artifact = Artifact(kind="policy_set", digest="f" * 64, name="by hand")
    Catalog(copied).register(artifact)
    with pytest.raises(StorageError, match=f"{artifact.artifact_id} is not in MLflow's registry, and no training"):
        ensure_registered(copied, artifact.artifact_id)


def test_another_setting_decides_only_where_it_is_the_only_one():
    assert champion_config(JUDGED).settings == ("query_agnostic",)
    aware = dataclasses.replace(JUDGED, settings=("query_aware",))
    assert champion_config(aware).settings == ("query_aware",)
