"""Which evaluation an id means, what is read of it, and what is refused in one line."""

import pytest
from report_home import (
    EVALUATION,
    MODEL,
    OTHER_POLICY,
    POLICIES,
    PROMPTS,
    SHARD,
    SNAPSHOT,
    artifact,
    mlflow_id,
    record,
    seeds_of,
)

from dashboards.report.evaluation_rows import find_evaluation, read_report_rows
from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.home import Home


@pytest.mark.parametrize(
    "any_id",
    [
        EVALUATION.artifact_id,
        EVALUATION.artifact_id[:16],
        SHARD.artifact_id,
        artifact("curve", "ruler snapkv 0").artifact_id,
        mlflow_id("evaluation"),
        mlflow_id("ruler kvp 1")[:8],
        "run of evaluate",
        "run of shard",
    ],
)
def test_every_id_of_an_evaluation_means_it(planted, any_id):
    given = planted.runs[any_id.removeprefix("run of ")] if any_id.startswith("run of") else any_id
    assert find_evaluation(planted.catalog, given) == (EVALUATION.artifact_id, planted.runs["evaluate"])


@pytest.mark.parametrize(
    ("any_id", "said"),
    [
        ("nothing-known", "no artifact, run or MLflow run 'nothing-known' in the catalog"),
        (MODEL.artifact_id, f"no run made {MODEL.artifact_id}"),
        (
            POLICIES[0].artifact_id,
            f"is of a train run and belongs to no single evaluation: name one of {EVALUATION.artifact_id}",
        ),
        (
            SNAPSHOT.artifact_id,
            f"is of a collect run and belongs to no single evaluation: name one of {EVALUATION.artifact_id}",
        ),
        (OTHER_POLICY.artifact_id, "belongs to no single evaluation: none came from it; run `kvp evaluate`"),
        ("policy", "may mean 3 things"),
    ],
)
def test_an_id_of_no_evaluation_is_refused_in_one_line(planted, any_id, said):
    with pytest.raises(StorageError) as refused:
        find_evaluation(planted.catalog, any_id)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_what_is_read_is_the_evaluation_s_own(planted):
    rows = planted.rows
    assert (rows.evaluation_id, rows.run_id) == (EVALUATION.artifact_id, planted.runs["evaluate"])
    assert {row["policy_set_id"] for row in rows.heads} == {policy.artifact_id for policy in POLICIES}
    assert {row["policy_set_id"] for row in rows.head_pairs} == {policy.artifact_id for policy in POLICIES}
    assert len(rows.samples) == 8 and len(rows.models) == 1
    assert {(row["method"], row["seed"]) for row in rows.curves if row["method"] == "kvp"} == {
        ("kvp", seed) for seed in seeds_of("kvp")
    }
    assert rows.input_ids([rows.run_id], "prompts") == [PROMPTS["test"].artifact_id]


def test_trainings_are_those_judged_and_the_others_on_the_same_traces(planted):
    rows = planted.rows
    assert [training.policy_set_id for training in rows.trainings] == [policy.artifact_id for policy in POLICIES]
    (other,) = rows.other_trainings
    assert (other.policy_set_id, other.objective, other.snapshot_ids) == (
        OTHER_POLICY.artifact_id,
        "mse",
        (SNAPSHOT.artifact_id,),
    )
    seconds = {row["run_id"]: row["seconds"] for row in planted.catalog.rows("runs")}
    assert len(other.part_run_ids) == 1
    assert other.seconds == pytest.approx(seconds[other.run.id] + seconds[other.part_run_ids[0]])
    assert other.costs == pytest.approx((1.1, 1.2, 1.3, 1.4, 1.5, 1.6))


def test_an_evaluation_that_failed_or_lost_its_rows_is_refused(tmp_path):
    catalog = Catalog(Home.open(tmp_path / "home"))
    catalog.register(MODEL)
    bare = artifact("evaluation", "without rows")
    record(catalog, "evaluate", {"model": MODEL}, {"evaluation": bare})
    with pytest.raises(StorageError, match=f"{bare.artifact_id} has no rows in the table curves"):
        read_report_rows(catalog, bare.artifact_id)
    with (
        pytest.raises(RuntimeError),
        catalog.record_run(
            stage="evaluate",
            stage_key="0" * 64,
            parameters={},
            inputs={"model": MODEL.artifact_id},
            code_fingerprint="1",
        ) as run,
    ):
        raise RuntimeError("out of memory")
    with pytest.raises(StorageError, match=r"is failed \(RuntimeError: out of memory\): name an evaluation that was"):
        find_evaluation(catalog, run.run_id)
