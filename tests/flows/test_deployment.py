"""The deployments of prefect.yaml, with a server, a work pool and a worker of the test's own, on both databases."""

import dataclasses
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from outcomes import catalog, points_of_home, policy_of_home
from processes import (
    CHECKOUT,
    environment,
    last_line,
    prefect_server,
    run_command,
    start_process,
    stop_process,
    tail,
)

from flows.runtime.run_options import Choices
from tests.postgresql import with_asyncpg

FLOWS = ("retrain", "collect", "train", "evaluate")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(params=["sqlite", "postgresql"])
def api(request, prefect_api, tmp_path_factory):
    """URL of a server with its state in that database."""
    if request.param == "sqlite":
        yield prefect_api
        return
    uri = request.getfixturevalue("postgresql").make_database("deployments")
    variables = {"PREFECT_API_DATABASE_CONNECTION_URL": with_asyncpg(uri)}
    with prefect_server(tmp_path_factory.mktemp("prefect-server"), **variables) as url:
        yield url


@pytest.fixture
def client_environment(api, tmp_path_factory):
    """Environment of processes that use the server."""
    return environment(PREFECT_API_URL=api, PREFECT_HOME=str(tmp_path_factory.mktemp("prefect-client")))


@pytest.fixture
def prefect(client_environment):
    """Runs a command of Prefect's that must succeed, and returns what it prints."""

    def run(*args: str, timeout_s: float = 120) -> str:
        done = run_command(["prefect", "--no-prompt", *args], env=client_environment, timeout_s=timeout_s)
        if done.code:
            said = last_line(done.stderr) if done.stderr.strip() else last_line(done.stdout)
            pytest.fail(f"prefect {' '.join(args)} ended with {done.code}: {said}", pytrace=False)
        return done.stdout

    return run


@pytest.fixture
def ask(api):
    """Asks the server's API."""

    def post(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{api}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    return post


@pytest.fixture
def deployed(prefect, client_environment, embedded_model_folder, tmp_path: Path):
    """The deployments of the checkout, and a worker that serves them; gives the worker's log."""
    del embedded_model_folder
    prefect("work-pool", "create", "kvpolicy", "--type", "process", "--overwrite")
    prefect("work-queue", "create", "gpu", "--pool", "kvpolicy", "--limit", "1")
    prefect("deploy", "--all")
    log = tmp_path / "worker.log"
    worker = start_process(["prefect", "worker", "start", "--pool", "kvpolicy"], log=log, env=client_environment)
    try:
        yield log
    finally:
        started = time.monotonic()
        stop_process(worker, timeout_s=30)
        assert time.monotonic() - started < 30, f"the worker did not stop: {tail(log)}"


def test_every_flow_is_a_deployment_and_retrain_does_the_whole_job(prefect, ask, deployed, smoke_run, tmp_path):
    deployments = {entry["name"]: entry for entry in ask("deployments/filter", {})}
    assert deployments.pop("watch-models")  # test_watch_deployment.py
    assert set(deployments) == set(FLOWS)
    for name, entry in deployments.items():
        assert entry["work_pool_name"] == "kvpolicy"
        assert entry["entrypoint"] == f"flows/pipeline.py:{name}"
        assert entry["parameters"] == {"preset": "demo", "model": "embedded", "seed": 0}
        assert entry["job_variables"] == {"env": {"OMP_WAIT_POLICY": "PASSIVE"}}
        assert entry["pull_steps"] == [
            {"prefect.deployments.steps.set_working_directory": {"directory": str(CHECKOUT)}}
        ]
        assert {"kvpolicy", "gpu"} <= set(entry["tags"])
        assert entry["work_queue_name"] == "gpu"
        schema = json.dumps(entry["parameter_openapi_schema"])
        assert all(f'"{field.name}"' in schema for field in dataclasses.fields(Choices))  # each option has its type

    home = tmp_path / "home"
    choices = json.dumps({"tasks": ["niah_single_1"]})
    parameters = ["preset=smoke", f"home={home}", f"choices={choices}"]
    options = [part for parameter in parameters for part in ("-p", parameter)]
    said = prefect("deployment", "run", "retrain/retrain", *options, "--watch", timeout_s=420)
    (run,) = ask("flow_runs/filter", {"flow_runs": {"deployment_id": {"any_": [deployments["retrain"]["id"]]}}})
    assert run["state_type"] == "COMPLETED", f"{last_line(said)}; the worker said: {tail(deployed)}"
    assert policy_of_home(home) == smoke_run.document["policy_set"]["id"]
    assert points_of_home(home) == points_of_home(smoke_run.home)

    flow_runs = {row["prefect_flow_run_id"] for row in catalog(home).rows("runs")}
    known = ask("flow_runs/filter", {"flow_runs": {"id": {"any_": sorted(flow_runs)}}})
    assert {entry["id"] for entry in known} == flow_runs
    assert all(entry["state_type"] == "COMPLETED" for entry in known)
