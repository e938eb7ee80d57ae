"""A schedule that fires on a GGUF file dropped into a watched folder, with a server and a worker of the test's own."""

import json
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outcomes import catalog
from processes import last_line, run_command, start_process, stop_process, tail

from tests.tiny_gguf import write_tiny_gguf

WATCH = "watch-models/watch-models"
SETTINGS = (
    'prompts.tasks=["niah_single_1"]',
    "prompts.length_tokens=1200",
    "train.num_steps=6",
    'evaluate.methods=["kvp"]',
    "evaluate.budgets=[64]",
    "evaluate.num_generated=0",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def ask(prefect_api):
    """Asks the server's API."""

    def request(method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{prefect_api}/{path}", content, headers, method=method)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            said = answer.read()
        return json.loads(said) if said else None

    return request


@pytest.fixture
def deployed(server_environment, ask, tmp_path: Path):
    """The deployments of the checkout by name, and a worker that serves them; they are gone afterwards."""

    def prefect(*args: str) -> None:
        done = run_command(["prefect", "--no-prompt", *args], env=server_environment, timeout_s=120)
        assert done.code == 0, last_line(done.stderr or done.stdout)

    prefect("work-pool", "create", "kvpolicy", "--type", "process", "--overwrite")
    prefect("deploy", "--all")
    deployments = {entry["name"]: entry for entry in ask("POST", "deployments/filter", {})}
    log = tmp_path / "worker.log"
    env = {**server_environment, "KVP_CACHE": str(tmp_path / "cache")}
    worker = start_process(["prefect", "worker", "start", "--pool", "kvpolicy"], log=log, env=env)
    try:
        yield deployments
    finally:
        for entry in deployments.values():  # with it the schedule
            ask("DELETE", f"deployments/{entry['id']}")
        stop_process(worker, timeout_s=30)


def wait_for(what: str, found: Callable[[], Any], *, log: Path, timeout_s: float = 400) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        time.sleep(0.5)
    pytest.fail(f"no {what} in {timeout_s:.0f} s; the worker said: {tail(log)}", pytrace=False)


def test_a_schedule_finds_a_dropped_gguf_file_and_it_ends_with_a_champion(deployed, ask, tmp_path):
    home, models, log = tmp_path / "home", tmp_path / "models", tmp_path / "worker.log"
    models.mkdir()
    watch, retrain = deployed["watch-models"], deployed["retrain"]
    assert (watch["global_concurrency_limit"]["limit"], watch["work_queue_name"]) == (1, "default")
    assert [(entry["active"], entry["schedule"]["cron"]) for entry in watch["schedules"]] == [(True, "17 * * * *")]

    def all_runs_of(deployment: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = {"deployment_id": {"any_": [deployment["id"]]}, "start_time": {"is_null_": False}}
        return ask("POST", "flow_runs/filter", {"flow_runs": wanted})

    # Other tests may have run deployments of the same names on this server.
    earlier = {run["id"] for deployment in (watch, retrain) for run in all_runs_of(deployment)}

    def runs_of(deployment: dict[str, Any]) -> list[dict[str, Any]]:
        return [run for run in all_runs_of(deployment) if run["id"] not in earlier]

    def ended() -> list[dict[str, Any]]:
        finals = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        return [run for run in runs_of(retrain) if run["state_type"] in finals]

    def outcomes() -> list[str]:
        return [row["outcome"] for row in catalog(home).rows("watched")] if (home / "home.json").exists() else []

    whole = write_tiny_gguf(tmp_path / "whole.gguf", positions=2048).read_bytes()
    (models / "dropped.gguf").write_bytes(whole[:-5_000])
    parameters = {
        "sources": [f"folder:{models}"],
        "home": str(home),
        "preset": "smoke",
        "settle_s": 0.5,
        "choices": {"settings": list(SETTINGS)},
    }
    schedule = {"schedule": {"interval": 15, "timezone": "UTC"}, "active": True, "parameters": parameters}
    ask("POST", f"deployments/{watch['id']}/schedules", [schedule])
    wait_for("waiting file", lambda: outcomes() == ["waiting"], log=log)
    assert runs_of(retrain) == []

    (models / "dropped.gguf").write_bytes(whole)
    (run,) = wait_for("end of retrain", ended, log=log)
    assert run["state_type"] == "COMPLETED", tail(log)
    assert run["parameters"]["model"] == str(models / "dropped.gguf")
    waiting, found, started = catalog(home).rows("watched")
    assert [row["outcome"] for row in (waiting, found, started)] == ["waiting", "found", "started"]
    assert started["flow_run_id"] == run["id"]
    assert {row["model_digest"] for row in catalog(home).rows("heads")} == {started["model_digest"]}
    (decision,) = catalog(home).rows("promotions")
    assert (decision["model_digest"], decision["decision"]) == (started["model_digest"], "promoted")

    # A watcher that dies between starting a pipeline and remembering it gets the same flow run.
    shutil.rmtree(home / "catalog" / "watched.lance")
    shutil.rmtree(home / "catalog" / "models.lance")
    wait_for("memory made again", lambda: outcomes() == ["found", "started"], log=log)
    assert catalog(home).rows("watched")[1]["flow_run_id"] == run["id"]
    assert [entry["id"] for entry in runs_of(retrain)] == [run["id"]]
    assert {entry["state_type"] for entry in runs_of(watch)} <= {"COMPLETED", "RUNNING", "PENDING", "CANCELLED"}
