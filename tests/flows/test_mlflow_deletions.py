"""Runs in homes of which people deleted something in MLflow's pages, or the database itself."""

import json
import shutil
from pathlib import Path

import pytest
from outcomes import assert_refused, catalog

from kvpolicy.names import CHAMPION
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.mlflow.client import open_client
from storage.mlflow.deletions import has_run
from storage.mlflow.tracking import CHALLENGER, Tracking


@pytest.fixture
def home(small_run, tmp_path: Path) -> Home:
    return Home.open(shutil.copytree(small_run.home, tmp_path / "home"))


def aliased(home: Home, policy: str) -> tuple[str, str]:
    tracking = Tracking(home)
    return tracking.policy_with_alias(CHAMPION, beside=policy), tracking.policy_with_alias(CHALLENGER, beside=policy)


def run(kvp_here, small_run, home: Home, *options: str) -> dict:
    finished = kvp_here("run", *small_run.options, *options, "--json", home=home.path)
    assert finished.code == 0, finished.stderr
    return json.loads(finished.stdout)


def test_a_deleted_experiment_is_refused_before_anything_runs(kvp_here, small_run, home):
    client, name = open_client(home), small_run.document["model"]["name"]
    number = client.get_experiment_by_name(name).experiment_id
    client.delete_experiment(number)
    before = catalog(home.path).rows("runs")
    for command in ("run", "collect", "train", "evaluate"):
        finished = kvp_here(command, *small_run.options, "--seed", "7", home=home.path)
        assert_refused(finished, repr(name), f"mlflow experiments restore --experiment-id {number}")
    assert catalog(home.path).rows("runs") == before


def test_a_deleted_model_of_the_registry_is_registered_again(kvp_here, small_run, home):
    policy = small_run.document["policy_set"]["id"]
    client = open_client(home)
    (model,) = client.search_registered_models()
    for command in (("promote", policy), ("run", *small_run.options)):
        client.delete_registered_model(model.name)
        finished = kvp_here(*command, home=home.path)
        assert finished.code == 0, finished.stderr
        assert aliased(home, policy) == (policy, policy)


@pytest.mark.slow
def test_with_another_policy_set_the_deleted_champion_is_registered_again(kvp_here, small_run, home):
    first = small_run.document["policy_set"]["id"]
    client = open_client(home)
    (model,) = client.search_registered_models()
    client.delete_registered_model(model.name)
    options = ("--methods", "kvp,knorm", "--set", "evaluate.num_analysed=0", "--seed", "2")
    promotion = run(kvp_here, small_run, home, *options)["promotion"]
    assert promotion["champion_before_id"] == first
    assert aliased(home, first) == (promotion["champion_id"], promotion["challenger_id"])


def test_a_lost_database_of_mlflow_is_made_again(kvp_here, small_run, home):
    policy = small_run.document["policy_set"]["id"]
    shutil.rmtree(home.mlflow)
    stale = kvp_here("stale", "--json", home=home.path)
    assert {(row["stage"], row["kind"], row["name"], row["now"]) for row in json.loads(stale.stdout)} == {
        ("train seed 0", "result", "MLflow run", "lost"),
        ("evaluate", "result", "MLflow run", "lost"),
    }
    assert not home.mlflow.exists()
    document = run(kvp_here, small_run, home)
    skipped = {name: stage["skipped"] for name, stage in document["stages"].items() if name != "prepare"}
    assert skipped == {"collect": True, "train": False, "evaluate": False}
    assert document["policy_set"]["id"] == policy
    assert document["evaluation"]["id"] == small_run.document["evaluation"]["id"]
    assert [row["value"] for row in document["curves"]] == [row["value"] for row in small_run.document["curves"]]
    assert aliased(home, policy) == (policy, policy)
    assert len(Catalog(home).rows("promotions")) == 1
    parents = {row["mlflow_run_id"] for row in Catalog(home).rows("runs", "outcome = 'completed'")} - {""}
    assert sum(has_run(home, run_id) for run_id in parents) == 2
    artifacts = open_client(home).list_artifacts(document_parent(home, document), "figures")
    assert len(artifacts) == 2
    again = run(kvp_here, small_run, home)
    assert all(stage["skipped"] for name, stage in again["stages"].items() if name != "prepare")


def document_parent(home: Home, document: dict) -> str:
    """The MLflow run of the evaluation of a document."""
    rows = Catalog(home).rows("runs", "outcome = 'completed' AND stage = 'evaluate'")
    return str(rows[-1]["mlflow_run_id"])


@pytest.mark.parametrize("which", ["evaluation", "training"])
def test_a_deleted_run_stays_deleted_and_is_in_nobody_s_way(kvp_here, small_run, home, which):
    client = open_client(home)
    stage = "evaluate" if which == "evaluation" else "train"
    run_id = Catalog(home).rows("runs", f"outcome = 'completed' AND stage = '{stage}'")[-1]["mlflow_run_id"]
    client.delete_run(run_id)
    document = run(kvp_here, small_run, home)
    assert all(found["skipped"] for name, found in document["stages"].items() if name != "prepare")
    assert client.get_run(run_id).info.lifecycle_stage == "deleted"
