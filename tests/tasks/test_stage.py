"""The one way to write a task: keys, skipping, and what is recorded of success and failure."""

import dataclasses
import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpolicy.digests import digest_bytes
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.training.policy_training import TrainConfig
from storage.catalog.catalog import Artifact, Catalog, RunRecorder
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.tracking import Tracking
from tasks.framework.references import ModelRef, PromptsRef, SnapshotRef
from tasks.framework.stage import _CHANGES_NO_RESULT, Stage, find_completed, loaded_code, run_stage, stage_task
from tasks.publish import EvaluationWork
from tasks.train import training_stage

RESULT = Artifact(kind="evaluation", digest=digest_bytes(b"result"), name="a result")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


@pytest.fixture
def stage(home: Home) -> Stage:
    model = Catalog(home).register(Artifact(kind="model", digest=digest_bytes(b"model"), name="a model"))
    return Stage(name="think", module="tasks.prompts", inputs={"model": model}, parameters={"depth": 2}, seed=1)


def work(run: RunRecorder) -> None:
    run.output("result", RESULT)


def test_the_same_stage_runs_once(home, stage):
    bodies = []

    def body(run: RunRecorder) -> None:
        bodies.append(run.run_id)
        work(run)

    assert find_completed(home, stage) is None
    first, second = run_stage(home, stage, body), run_stage(home, stage, body)
    assert find_completed(home, stage).run_id == first.run_id
    assert bodies == [first.run_id] == [second.run_id]
    assert (first.skipped, second.skipped) == (False, True)
    assert first.outputs == second.outputs == {"result": RESULT.artifact_id}


def test_a_kind_of_artifact_that_nobody_declared_is_refused(home, stage):
    with pytest.raises(StorageError, match="kind thought are declared by no stage"):
        run_stage(home, stage, lambda run: run.output("result", dataclasses.replace(RESULT, kind="thought")))
    assert [row["outcome"] for row in Catalog(home).rows("runs")] == ["failed"]


def test_a_skip_is_a_row_that_names_the_run_it_stands_on(home, stage):
    first = run_stage(home, stage, work)
    run_stage(home, stage, work)
    run_stage(home, stage, work, note_skip=False)
    (skipped,) = Catalog(home).rows("runs", "outcome = 'skipped'")
    assert skipped["reused_run_id"] == first.run_id
    assert (skipped["stage"], skipped["stage_key"], skipped["seed"]) == ("think", stage.key, 1)


def test_a_failure_is_a_row_with_its_reason_and_makes_nothing(home, stage):
    def fail(run: RunRecorder) -> None:
        work(run)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run_stage(home, stage, fail)
    (failed,) = Catalog(home).rows("runs")
    assert (failed["outcome"], failed["reason"]) == ("failed", "OSError: the disk is full")
    assert find_completed(home, stage) is None
    with pytest.raises(StorageError, match="no artifact"):
        Catalog(home).artifact(RESULT.artifact_id)
    assert not run_stage(home, stage, work).skipped


def test_a_result_that_is_gone_is_made_again(home, stage, tmp_path):
    place = tmp_path / "result"

    def make(run: RunRecorder) -> None:
        place.write_text("a result")
        run.output("result", dataclasses.replace(RESULT, uri=str(place)))

    first = run_stage(home, stage, make)
    assert run_stage(home, stage, make).skipped
    place.unlink()
    assert find_completed(home, stage) is None
    again = run_stage(home, stage, make)
    assert not again.skipped
    assert again.run_id != first.run_id
    assert again.outputs == first.outputs
    assert run_stage(home, stage, make).run_id == again.run_id


def test_a_result_whose_mlflow_run_is_lost_is_made_again(mlflow_home, stage):
    def log(run: RunRecorder) -> None:
        work(run)
        run.mlflow_run_id = Tracking(mlflow_home).start_parent(experiment="e", name="n", tags={}, timestamp_ms=1)

    first, second = run_stage(mlflow_home, stage, log), run_stage(mlflow_home, stage, log)
    assert second.skipped
    assert len(first.mlflow_run_id) == 32 and second.mlflow_run_id == first.mlflow_run_id
    mlflow_home.mlflow_db.unlink()
    assert find_completed(mlflow_home, stage) is None
    assert not run_stage(mlflow_home, stage, work).skipped


def test_of_two_at_once_one_runs_and_the_other_finds_its_result(home, stage):
    bodies = []

    def slow(run: RunRecorder) -> None:
        bodies.append(run.run_id)
        time.sleep(0.3)
        work(run)

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda _: run_stage(home, stage, slow), range(2)))
    assert [outcome.run_id for outcome in outcomes] == bodies * 2
    assert sorted(outcome.skipped for outcome in outcomes) == [False, True]


def test_stages_that_differ_do_not_wait_for_each_other(home, stage):
    both = threading.Barrier(2, timeout=30)

    def meet(run: RunRecorder) -> None:
        both.wait()  # broken, and so a failure, if one runs after the other
        work(run)

    stages = [stage, dataclasses.replace(stage, seed=2)]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda one: run_stage(home, one, meet), stages))
    assert not any(outcome.skipped for outcome in outcomes)


def test_a_failure_leaves_no_lock_behind(home, stage):
    def fail(run: RunRecorder) -> None:
        raise OSError("no luck")

    for _ in range(2):
        with pytest.raises(OSError, match="no luck"):
            run_stage(home, stage, fail)
    assert [run["outcome"] for run in Catalog(home).rows("runs")] == ["failed"] * 2


def test_code_that_changes_no_result_changes_no_key():
    for name in _CHANGES_NO_RESULT:
        assert importlib.util.find_spec(name) is not None  # a module that was renamed would count again
    covered = Stage(name="train", module="tasks.train", inputs={}, parameters={}).modules.keys()
    assert not covered & _CHANGES_NO_RESULT
    assert {
        "tasks.train",
        "kvpolicy.training.policy_training",
        "kvpolicy.objectives.cost",
        "tasks.inputs.stored_traces",
    } <= covered


@pytest.mark.parametrize("module", ["tasks.evaluate", "tasks.analyse"])
def test_a_change_of_how_scores_are_added_up_evaluates_nothing_again(module):
    covered = loaded_code(module)
    assert "kvpolicy.results.scores" in covered
    assert not {"kvpolicy.results.statistics", "kvpolicy.results.comparisons", "kvpolicy.results.metrics"} & set(
        covered
    )


def test_a_stage_runs_what_its_request_chooses_and_no_other_choice():
    model = ModelRef(artifact_id="model-0", digest="", name="", folder="", dtype="float32", num_heads=1)
    snapshot = SnapshotRef(artifact_id="snapshot-0", collection="", manifest_version=1, setting="query_agnostic")
    objectives = {
        name: training_stage(model, snapshot, TrainConfig(objective=name), seed=0).modules.keys()
        for name in ("exact", "pairwise")
    }
    assert objectives["exact"] ^ objectives["pairwise"] == {"kvpolicy.objectives.exact", "kvpolicy.objectives.pairwise"}

    prompts = PromptsRef(artifact_id="prompts-0", split="test", seed=0, num_samples=1, path="")
    read = {"home": Home(path=Path()), "model": model, "trained": (), "prompts": prompts}
    methods = [
        EvaluationWork(**read, config=EvaluateConfig(methods=names), seed=0).stage.modules.keys()
        for names in (("snapkv",), ("snapkv", "knorm"), ("pyramidkv",))
    ]
    assert methods[1] - methods[0] == {"kvpolicy.methods.knorm"}
    assert {"kvpolicy.methods.pyramidkv", "kvpolicy.methods.snapkv"} <= methods[2]  # one is made of the other


def test_the_key_covers_everything_that_a_result_depends_on(stage):
    changes = [
        {"name": "dream"},
        {"module": "tasks.model"},
        {"inputs": {"model": "model-0000000000000000"}},
        {"inputs": {"network": stage.inputs["model"]}},
        {"parameters": {"depth": 3}},
        {"seed": 2},
        {"seed": None},
    ]
    keys = {stage.key, *(dataclasses.replace(stage, **change).key for change in changes)}
    assert len(keys) == 1 + len(changes)
    assert dataclasses.replace(stage, parts={"fragment": "trace_fragment-0000000000000000"}).key == stage.key


def test_what_a_run_read_and_made_is_known(home, stage):
    part = Catalog(home).register(Artifact(kind="trace_fragment", digest=digest_bytes(b"part"), name="a part"))
    run = run_stage(home, dataclasses.replace(stage, parts={"part": part}), work)
    edges = {(edge["role"], edge["name"]): edge["artifact_id"] for edge in Catalog(home).rows("edges")}
    assert {("input", "model"), ("input", "part"), ("input", "code"), ("input", "environment")} < set(edges)
    assert edges["output", "result"] == run.outputs["result"]
    kinds = {node.kind for node in Catalog(home).lineage(RESULT.artifact_id, "up").nodes.values()}
    assert {"model", "trace_fragment", "code", "environment"} <= kinds


def test_tasks_keep_no_results_of_their_own():
    made = stage_task("some-name")(work)
    assert (made.name, made.persist_result) == ("some-name", False)
    assert made.fn is work
