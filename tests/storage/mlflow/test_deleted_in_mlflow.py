"""What people delete in MLflow's pages, or with its files: refused in one line, or made again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.names import CHAMPION
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.client import open_client
from storage.mlflow.deletions import has_run, require_experiment
from storage.mlflow.registered_models import RegisteredModels
from storage.mlflow.tracking import POLICY_SET_TAG, CurveRun, Tracking

EXPERIMENT, POLICY = "tiny / llama", "policy_set-1"


@pytest.fixture
def home(mlflow_home: Home) -> Home:
    return mlflow_home


@pytest.fixture
def tracking(home: Home) -> Tracking:
    return Tracking(home)


@pytest.fixture
def client(home: Home) -> Any:
    return open_client(home)


@pytest.fixture
def parent(tracking: Tracking) -> str:
    return start(tracking)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "weights").write_text("w")
    return tmp_path / "policy"


def start(tracking: Tracking) -> str:
    return tracking.start_parent(experiment=EXPERIMENT, name="evaluate", tags={}, timestamp_ms=1)


def register(tracking: Tracking, folder: Path, run_id: str) -> str:
    tags = {POLICY_SET_TAG: POLICY}
    return tracking.register_policy(name="m", folder=folder, run_id=run_id, tags=tags, description="d")


def curve(parent: str) -> CurveRun:
    return CurveRun(
        experiment=EXPERIMENT,
        parent_run_id=parent,
        name="kvp",
        tags={},
        params={},
        points=[("kl", 64, 0.5)],
        timestamp_ms=1,
    )


def test_a_new_home_has_no_database_for_having_been_asked(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home")
    require_experiment(home, EXPERIMENT)
    assert not has_run(home, "0" * 32)
    assert [path.name for path in home.path.iterdir()] == ["home.json"]


def test_a_deleted_experiment_is_one_line_whose_remedy_works(
    home: Home, tracking: Tracking, client: Any, parent: str
) -> None:
    require_experiment(home, EXPERIMENT)
    number = client.get_experiment_by_name(EXPERIMENT).experiment_id
    client.delete_experiment(number)
    for call in (lambda: require_experiment(home, EXPERIMENT), lambda: start(tracking)):
        with pytest.raises(StorageError) as caught:
            call()
        assert str(caught.value) == (
            f"MLflow's experiment {EXPERIMENT!r} was deleted: restore it with "
            f"`MLFLOW_TRACKING_URI={home.mlflow_tracking_uri} mlflow experiments restore --experiment-id {number}`"
        )
    assert has_run(home, parent)
    remedy = str(caught.value).split("`")[1].split()
    variable, _, value = remedy[0].partition("=")
    command = [sys.executable, "-m", *remedy[1:]]
    subprocess.run(command, env={**os.environ, variable: value}, check=True, capture_output=True, timeout=120)
    assert start(tracking) == parent


def test_a_deleted_run_is_logged_again_under_its_parent(home: Home, tracking: Tracking, client: Any) -> None:
    parent = start(tracking)
    run_id = tracking.log_curve(curve(parent))
    client.delete_run(run_id)
    assert has_run(home, run_id)  # until `mlflow gc`
    again = tracking.log_curve(curve(parent))
    assert again != run_id
    assert tracking.log_curve(curve(parent)) == again


def test_a_parent_that_is_deleted_while_it_is_written_to_is_one_line_and_then_another(
    tracking: Tracking, client: Any, parent: str
) -> None:
    tracking.log_curve(curve(parent))
    client.delete_run(parent)
    with pytest.raises(StorageError, match=r"restore it in MLflow, or run the same command again$"):
        tracking.finish(parent, timestamp_ms=1)
    another = start(tracking)
    assert another != parent
    child = client.get_run(tracking.log_curve(replace(curve(parent), parent_run_id=another)))
    assert child.data.tags["mlflow.parentRunId"] == another
    tracking.finish(another, timestamp_ms=1)


@pytest.mark.parametrize("deleted", ["version", "model", "files"])
def test_what_is_deleted_of_a_registered_policy_set_is_registered_again(
    home: Home, tracking: Tracking, client: Any, parent: str, folder: Path, deleted: str
) -> None:
    number = register(tracking, folder, parent)
    assert tracking.has_policy(POLICY)
    assert tracking.move_alias(CHAMPION, POLICY)
    if deleted == "version":
        client.delete_model_version("m", number)
    elif deleted == "model":
        client.delete_registered_model("m")
    else:
        shutil.rmtree(home.mlflow_artifacts)
        with pytest.raises(StorageError, match="the folder is empty or lost"):
            RegisteredModels(home).names(RegisteredModels(home).find("m"))
    assert not tracking.has_policy(POLICY)
    register(tracking, folder, parent)
    assert tracking.has_policy(POLICY)
    assert tracking.move_alias(CHAMPION, POLICY) == (deleted != "files")
    found = RegisteredModels(home).find("m", alias=CHAMPION)
    assert RegisteredModels(home).names(found) == ["weights"]


def test_an_alias_that_is_removed_moves_back(tracking: Tracking, client: Any, parent: str, folder: Path) -> None:
    register(tracking, folder, parent)
    tracking.move_alias(CHAMPION, POLICY)
    client.delete_registered_model_alias("m", CHAMPION)
    assert tracking.policy_with_alias(CHAMPION, beside=POLICY) == ""
    assert tracking.move_alias(CHAMPION, POLICY)


def test_a_model_that_is_renamed_keeps_its_policy_sets(
    tracking: Tracking, client: Any, parent: str, folder: Path
) -> None:
    number = register(tracking, folder, parent)
    client.rename_registered_model("m", "renamed")
    assert register(tracking, folder, parent) == number
    assert [model.name for model in client.search_registered_models()] == ["renamed"]
    assert tracking.move_alias(CHAMPION, POLICY)
