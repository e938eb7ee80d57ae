"""Against MLflow's own SQLite store."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.errors import InputError
from kvpolicy.names import CHAMPION
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.tracking import CHALLENGER, POLICY_SET_TAG, CurveRun, DatasetRef, Tracking

TIME = 1_700_000_000_000
DIGEST = "d" * 64


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.open(tmp_path_factory.mktemp("a home with spaces"))


SETUP = """
import sys
from storage.home import Home
from storage.mlflow.tracking import Tracking

Tracking(Home.open(sys.argv[1])).prepare()
import mlflow.telemetry.client as telemetry
print(telemetry.get_telemetry_client())
"""


@pytest.fixture(scope="module")
def set_up(home: Home) -> list[tuple[str, str]]:
    command = [sys.executable, "-c", SETUP, str(home.path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    return [process.communicate(timeout=120) for process in processes]


@pytest.fixture(scope="module")
def tracking(home: Home, set_up: list[tuple[str, str]]) -> Tracking:
    tracking = Tracking(home)
    tracking.prepare()
    tracking.prepare()
    return tracking


@pytest.fixture
def client(tracking: Tracking) -> Any:
    return tracking._client


def curve(name: str = "kvp", **changes: Any) -> CurveRun:
    points = [(metric, budget, budget / 7) for metric in ("kl", "string_match") for budget in (64, 128, 256)]
    base = CurveRun(
        experiment="curves / demo",
        parent_run_id="",
        name=name,
        tags={"method": name},
        params={"seed": "0"},
        points=points,
        timestamp_ms=TIME,
        datasets=[DatasetRef(name="prompts", digest=DIGEST, uri="catalog", context="evaluation")],
    )
    return replace(base, **changes)


def test_a_curve_is_a_finished_run_with_the_budget_as_step(tracking: Tracking, client: Any, home: Home) -> None:
    parent = tracking.start_parent(experiment="curves / demo", name="evaluation", tags={"a": "b"}, timestamp_ms=TIME)
    run_id = tracking.log_curve(curve(parent_run_id=parent))
    history = client.get_metric_history(run_id, "kl")
    assert [(point.step, point.value, point.timestamp) for point in history] == [
        (budget, budget / 7, TIME) for budget in (64, 128, 256)
    ]
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name, run.info.start_time) == ("FINISHED", "kvp", TIME)
    assert run.data.params == {"seed": "0"}
    tags = {"method": "kvp", "mlflow.parentRunId": parent, "kvp.digest.prompts": DIGEST}
    assert tags.items() <= run.data.tags.items()
    (read,) = run.inputs.dataset_inputs
    assert (read.dataset.name, read.dataset.digest) == ("prompts", DIGEST[:36])
    assert [(tag.key, tag.value) for tag in read.tags] == [("mlflow.data.context", "evaluation")]
    tracking.finish(parent, timestamp_ms=TIME + 5)
    assert client.get_run(parent).info.end_time == TIME + 5
    assert Path(home.mlflow_db).exists()


def test_a_retry_adds_neither_runs_nor_points(tracking: Tracking, client: Any) -> None:
    logged = curve("retried")
    run_id = tracking.log_curve(logged)
    client.update_run(run_id, status="RUNNING")  # as if the first attempt had died before its end
    assert tracking.log_curve(logged) == run_id
    assert tracking.log_curve(logged) == run_id
    assert len(client.get_metric_history(run_id, "kl")) == 3
    assert len(client.get_run(run_id).inputs.dataset_inputs) == 1
    assert client.get_run(run_id).info.status == "FINISHED"
    assert tracking.log_curve(replace(logged, points=[("kl", 64, 0.0)])) != run_id
    again = {"experiment": "curves / demo", "name": "parent", "tags": {}, "timestamp_ms": TIME}
    assert tracking.start_parent(**again) == tracking.start_parent(**again)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_numbers_are_refused(tracking: Tracking, value: float) -> None:
    with pytest.raises(StorageError, match="'kl' at step 64 is"):
        tracking.log_curve(curve("bad", points=[("kl", 64, value)]))
    with pytest.raises(StorageError, match="two values at step 64"):
        tracking.log_curve(curve("bad", points=[("kl", 64, 0.1), ("kl", 64, 0.2)]))


def test_training_curves_and_artifacts_are_kept_in_the_home(
    tracking: Tracking, client: Any, home: Home, tmp_path: Path
) -> None:
    run_id = tracking.start_parent(experiment="training", name="train", tags={}, timestamp_ms=TIME)
    points = [("loss", step, 1 / (step + 1)) for step in range(2500)]
    tracking.log_training(run_id, points, timestamp_ms=TIME)
    assert len(client.get_metric_history(run_id, "loss")) == 2500
    (tmp_path / "note.json").write_text("{}")
    tracking.log_artifact(run_id, tmp_path / "note.json", "notes")
    tracking.log_artifact(run_id, tmp_path)
    assert {item.path for item in client.list_artifacts(run_id)} == {"notes", "note.json"}
    assert list(home.mlflow_artifacts.rglob("note.json"))
    with pytest.raises(StorageError, match="no file or folder"):
        tracking.log_artifact(run_id, tmp_path / "none")


def test_policies_are_versions_with_aliases(tracking: Tracking, client: Any, tmp_path: Path) -> None:
    run_id = tracking.start_parent(experiment="training", name="policies", tags={}, timestamp_ms=TIME)
    versions = []
    for number in range(2):
        folder = tmp_path / f"policy{number}"
        folder.mkdir()
        (folder / "policy.safetensors").write_bytes(bytes([number]) * 64)
        (folder / "policy.json").write_text(json.dumps({"number": number}))
        arguments: dict[str, Any] = {"name": "kvp-model", "folder": folder, "run_id": run_id}
        arguments |= {"tags": {POLICY_SET_TAG: f"policy_set-{number}"}, "description": "A *policy*."}
        versions.append(tracking.register_policy(**arguments))
        assert tracking.register_policy(**arguments) == versions[-1]
    assert versions == ["1", "2"]
    assert client.get_registered_model("kvp-model").aliases == {}  # nothing was decided yet
    assert tracking.policy_with_alias(CHAMPION, beside="policy_set-1") == ""
    for is_new in (True, False):
        assert tracking.move_alias(CHAMPION, "policy_set-0") is is_new
        assert tracking.move_alias(CHALLENGER, "policy_set-1") is is_new
    assert tracking.policy_with_alias(CHAMPION, beside="policy_set-1") == "policy_set-0"
    challenger = client.get_model_version_by_alias("kvp-model", "challenger")
    assert str(challenger.version) == "2"
    assert challenger.tags[POLICY_SET_TAG] == "policy_set-1"
    assert challenger.run_id == run_id
    tracking.move_alias(CHAMPION, "policy_set-1")
    aliases = {alias: int(version) for alias, version in client.get_registered_model("kvp-model").aliases.items()}
    assert aliases == {"champion": 2, "challenger": 2}
    with pytest.raises(StorageError, match="policy_set-9 is no version in MLflow's registry"):
        tracking.move_alias(CHAMPION, "policy_set-9")
    with pytest.raises(InputError, match="no folder at"):
        tracking.register_policy(name="x", folder=tmp_path / "none", run_id=run_id, tags={}, description="")


def test_unknown_runs_are_one_line(tracking: Tracking) -> None:
    with pytest.raises(StorageError, match="cannot end the MLflow run none: ") as caught:
        tracking.finish("none", timestamp_ms=TIME)
    assert "\n" not in str(caught.value)


def test_a_demo_of_curves_takes_seconds(tracking: Tracking) -> None:
    points = [(f"task{metric}.kl", budget, 0.5) for metric in range(20) for budget in range(10)]
    started = time.perf_counter()
    for number in range(22):
        tracking.log_curve(curve(f"fast{number}", points=points))
    assert time.perf_counter() - started < 10  # 1 s on an idle machine


def test_two_processes_set_the_database_up_at_once_quietly_and_unreported(set_up: list[tuple[str, str]]) -> None:
    assert set_up == [("None\n", "")] * 2


def test_a_hub_models_name_is_registered_without_what_mlflow_refuses(tracking: Tracking, tmp_path: Path) -> None:
    (tmp_path / "policy.json").write_text("{}")
    run_id = tracking.start_parent(experiment="owner/name", name="train", tags={}, timestamp_ms=1)
    arguments: dict[str, Any] = {"folder": tmp_path, "run_id": run_id, "tags": {}, "description": ""}
    assert tracking.register_policy(name="kvpolicy-owner/name:v1-7b7c3f2e", **arguments) == "1"
    assert tracking.register_policy(name="kvpolicy-owner/name:v1-7b7c3f2e", **arguments) == "1"
    names = [model.name for model in tracking._client.search_registered_models()]
    assert "kvpolicy-owner-name-v1-7b7c3f2e" in names
