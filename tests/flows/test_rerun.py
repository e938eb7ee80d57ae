"""Repeating recorded runs: what comes out, what is recorded of it, and what stays as it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from outcomes import assert_refused, catalog
from sources import copied_sources, documented

from flows.replay.recorded import find_original
from kvpolicy.errors import InputError
from storage.errors import StorageError
from storage.home import Home

# Stage -> the stages that a repetition of it runs.
STAGES = {
    "prompts": {"prompts"},
    "collect": {"collect", "collect-fragment"},
    "collect-fragment": {"collect-fragment"},
    "train": {"train", "train-heads"},
    "train-heads": {"train-heads"},
    "train-soft-tokens": {"train-soft-tokens"},
    "evaluate": {"evaluate", "evaluate-shard", "analyse-shard"},
    "evaluate-shard": {"evaluate-shard"},
    "analyse-shard": {"analyse-shard"},
}
QUICK = ("train", "collect-fragment")  # the others are slow: each sets up an MLflow of its own, and judges
NOT_OF_THE_RESULT = {"run_id", "created_at", "mlflow_run_id"}
RESULTS = ("curves", "heads", "head_pairs", "metrics", "head_costs", "scores", "comparisons", "findings", "samples")


def newest(home: Path, stage: str) -> dict[str, Any]:
    """The newest completed run of a stage."""
    return catalog(home).rows("runs", f"stage = '{stage}' AND outcome = 'completed'")[-1]


def results(home: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of results that is shown, by table."""
    return {table: catalog(home).rows(table) for table in RESULTS}


def rows_of(home: Path, table: str, run_id: str) -> list[dict[str, Any]]:
    """What a run wrote into a table, whether it is shown or not."""
    rows = catalog(home).rows(table, f"run_id = '{run_id}'", outcomes=("completed", "repeated"))
    told = [row for row in rows if row.get("name") != "seconds"]  # the metric that no two runs have in common
    return [{name: value for name, value in row.items() if name not in NOT_OF_THE_RESULT} for row in told]


@pytest.fixture
def copy(small_run, tmp_path) -> Path:
    """A copy of the small run's home, to be damaged."""
    return shutil.copytree(small_run.home, tmp_path / "copy")


def mlflow_points(home: Path) -> set[tuple[Any, ...]]:
    """Every point of every run in MLflow, and the aliases of every registered model."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=Home.open(home, create=False).mlflow_tracking_uri)
    found: set[tuple[Any, ...]] = set()
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            for name in run.data.metrics:
                points = client.get_metric_history(run.info.run_id, name)
                assert len({point.step for point in points}) == len(points)
                found |= {(run.info.run_id, name, point.step, point.value) for point in points}
    for model in client.search_registered_models():
        found |= {(model.name, alias, version) for alias, version in model.aliases.items()}
    return found


@pytest.mark.parametrize(
    "stage", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STAGES]
)
def test_a_repetition_is_identical_and_changes_nothing(kvp_here, small_run, stage):
    home = small_run.home
    original = newest(home, stage)
    before = results(home), mlflow_points(home), sorted(path for path in home.glob("traces/**/*"))
    num_runs = len(catalog(home).rows("runs"))
    finished = kvp_here("rerun", original["run_id"], "--json", home=home)
    assert finished.code == 0, finished.stderr
    said = json.loads(finished.stdout)
    assert (said["repeats"], said["stage"], said["identical"]) == (original["run_id"], stage, True)
    assert set(said) == documented("kvp rerun")
    assert [difference for difference in said["differences"] if difference["kind"] != "code"] == []
    assert said["kept"] == ""
    assert not list(home.glob("repeats/*"))
    made = catalog(home).rows("runs")[num_runs:]
    assert {(run["outcome"], run["reason"]) for run in made} == {("repeated", f"repeats {original['run_id']}")}
    (whole,) = [run for run in made if run["stage"] == stage]
    assert whole["run_id"] == said["run"]
    assert {run["stage"] for run in made} == STAGES[stage]
    for table in RESULTS:
        assert rows_of(home, table, said["run"]) == rows_of(home, table, original["run_id"])
    assert (results(home), mlflow_points(home), sorted(path for path in home.glob("traces/**/*"))) == before


@pytest.mark.slow  # the pipeline, and two repetitions
def test_a_run_after_repetitions_finds_everything(kvp_here, small_run):
    home = small_run.home
    completed = catalog(home).rows("runs", "outcome = 'completed'")
    assert kvp_here("rerun", newest(home, "train")["run_id"], home=home).code == 0
    document = json.loads(kvp_here("run", *small_run.options, "--json", home=home).stdout)
    assert [name for name, stage in document["stages"].items() if stage["skipped"]] == ["collect", "train", "evaluate"]
    assert catalog(home).rows("runs", "outcome = 'completed'") == completed


@pytest.mark.slow  # a training in a process of its own
def test_other_code_that_changes_results_is_told(kvp, kvp_here, small_run, tmp_path):
    home, original = small_run.home, newest(small_run.home, "train")
    before = results(home), mlflow_points(home)
    sources = copied_sources(tmp_path)
    module = sources / "kvpolicy" / "training" / "policy_training.py"
    module.write_text(module.read_text().replace("0.01 + 0.99", "0.02 + 0.98"))
    finished = kvp("rerun", original["run_id"], "--json", home=home, PYTHONPATH=str(sources))
    assert finished.code == 1, finished.stderr
    assert f"the code is not what {original['run_id']} ran: kvpolicy.training.policy_training\n" in finished.stderr
    said = json.loads(finished.stdout)
    moved = {(difference["kind"], difference["name"]) for difference in said["differences"]}
    assert not said["identical"]
    assert {("code", "module kvpolicy.training.policy_training"), ("output", "policy"), ("input", "group_000")} <= moved
    assert ("result", "heads L00.H0") in moved
    assert {name for kind, name in moved if kind == "code" and name.startswith("module")} == {
        "module kvpolicy.training.policy_training"
    }
    assert not [name for kind, name in moved if kind in ("parameter", "seed", "stage")]
    assert Path(said["kept"]).is_dir()
    assert (results(home), mlflow_points(home)) == before
    policy = next(difference["second"] for difference in said["differences"] if difference["kind"] == "output")
    graph = catalog(home).lineage(policy, "up")
    assert said["run"] in graph.nodes
    assert kvp_here("rerun", said["run"], home=home).stderr.count("is a repetition itself") == 1
    document = json.loads(kvp_here("run", *small_run.options, "--json", home=home).stdout)
    assert document["policy_set"] == small_run.document["policy_set"]
    assert document["stages"]["train"]["skipped"] and document["stages"]["evaluate"]["skipped"]
    assert (
        catalog(home).artifact(small_run.document["policy_set"]["id"]).uri == small_run.document["policy_set"]["path"]
    )


@pytest.mark.slow  # an evaluation in a process of its own
def test_other_code_that_changes_no_result_is_identical(kvp, small_run, tmp_path):
    sources = copied_sources(tmp_path)
    module = sources / "kvpolicy" / "results" / "budget_curves.py"
    module.write_text(module.read_text() + "\nCHANGED = 1\n")
    original = newest(small_run.home, "evaluate")["run_id"]
    finished = kvp("rerun", original, "--json", home=small_run.home, PYTHONPATH=str(sources))
    assert finished.code == 0, finished.stderr
    said = json.loads(finished.stdout)
    assert said["identical"]
    assert {difference["kind"] for difference in said["differences"]} == {"code"}
    assert "module kvpolicy.results.budget_curves" in {difference["name"] for difference in said["differences"]}


@pytest.mark.parametrize("kind", ["curve_id", "mlflow_run_id", "evaluation_id"])
def test_what_a_run_made_stands_for_it(small_run, kind):
    home = Home.open(small_run.home)
    curve = catalog(small_run.home).rows("curves")[0]
    assert find_original(home, curve[kind]).known.run_id == newest(small_run.home, "evaluate")["run_id"]


def test_what_cannot_be_repeated_is_told_in_one_line(small_run, copy, kvp_here):
    home = Home.open(copy)
    kvp_here("collect", *small_run.options, home=copy)
    skipped = catalog(copy).rows("runs", "outcome = 'skipped'")[-1]
    with pytest.raises(InputError, match=f"was skipped: repeat {skipped['reused_run_id']}"):
        find_original(home, skipped["run_id"])
    with pytest.raises(StorageError, match="no run made model-"):
        find_original(home, small_run.document["model"]["id"])
    arguments = {"stage": "train", "stage_key": "k", "parameters": {}, "inputs": {}, "code_fingerprint": "f" * 64}
    with catalog(copy).record_run(**arguments) as older:
        pass
    with pytest.raises(InputError, match=f"{older.run_id} has no recorded request"):
        find_original(home, older.run_id)
    with pytest.raises(OSError, match="full"), catalog(copy).record_run(**arguments) as failed:
        raise OSError("the disk is full")
    with pytest.raises(InputError, match=rf"{failed.run_id} failed \(OSError: the disk is full\)"):
        find_original(home, failed.run_id)
    assert_refused(kvp_here("rerun", failed.run_id, home=copy), failed.run_id, "only a completed run")


def test_an_input_that_is_lost_is_told_in_one_line(kvp_here, copy):
    before, kept = catalog(copy).rows("runs"), set(copy.glob("repeats/*"))
    for path in copy.glob("traces/fragments/*"):
        shutil.rmtree(path)
    finished = kvp_here("rerun", newest(copy, "train")["run_id"], home=copy)
    assert_refused(finished, "snapshot of run-", "trace_fragment-", "lost or damaged", "kvp run")
    for path in copy.glob("prompts/*"):
        path.write_bytes(path.read_bytes()[:100])
    finished = kvp_here("rerun", newest(copy, "evaluate")["run_id"], home=copy)
    assert_refused(finished, "prompts of run-", "lost or damaged")
    assert set(copy.glob("repeats/*")) == kept
    assert catalog(copy).rows("runs") == before


def test_a_model_that_is_not_what_it_was_is_told_in_one_line(kvp_here, small_run):
    note = Path(small_run.options[-1]) / "note.txt"  # it counts: a tokenizer's vocabulary may be such a file
    note.write_text("a remark")
    try:
        finished = kvp_here("rerun", newest(small_run.home, "prompts")["run_id"], home=small_run.home)
    finally:
        note.unlink()
    assert_refused(finished, "model tiny-llama at ", "no longer what was recorded", "put that model back")
