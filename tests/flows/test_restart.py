"""One seed, one result: in another home, stage by stage, and after a run was killed anywhere."""

import json
import os
import random
import signal
import time

import pytest
from outcomes import catalog, points_of_home, policy_of_home
from processes import environment, start_process, tail

from storage.traces.store import TraceStore


@pytest.fixture(scope="module", params=["small", pytest.param("smoke", marks=pytest.mark.slow)])
def reference(request):
    """An undisturbed run: of a tiny model, and of the embedded one."""
    return request.getfixturevalue(f"{request.param}_run")


@pytest.mark.slow
def test_stages_one_by_one_in_another_home_give_the_same(kvp_here, reference, tmp_path):
    reports = [
        json.loads(kvp_here(stage, *reference.options, "--json", home=tmp_path).stdout)
        for stage in ("collect", "train", "evaluate")
    ]
    assert [report["home"] for report in reports] == [str(tmp_path)] * 3
    assert not any(report["skipped"] for report in reports)
    ids = [reference.document[name]["id"] for name in ("trace_snapshot", "policy_set", "evaluation")]
    assert [report["artifact_id"] for report in reports] == ids
    assert policy_of_home(tmp_path) == reference.document["policy_set"]["id"]
    assert points_of_home(tmp_path) == points_of_home(reference.home)


def test_a_killed_run_goes_on_where_it_was(kvp_here, server_environment, reference, tmp_path):
    stages = reference.document["stages"]
    delay_s = random.uniform(0, sum(stages[name]["seconds"] for name in ("collect", "train", "evaluate")))
    told = f"killed {delay_s:.2f} s after its prompts were written"
    home, log = tmp_path / "home", tmp_path / "log"
    command = ["kvp", "run", *reference.options, "--home", str(home)]
    process = start_process(command, log=log, env=server_environment)
    deadline = time.monotonic() + 120
    while len(list(home.glob("prompts/*.parquet"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline, tail(log)
        time.sleep(0.1)
    time.sleep(delay_s)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=20)

    again = kvp_here("run", *reference.options, "--json", home=home)
    assert again.code == 0, f"{told}: {again.stderr}"
    assert policy_of_home(home) == reference.document["policy_set"]["id"], told
    assert points_of_home(home) == points_of_home(reference.home), told
    for table in ("scores", "samples", "heads", "head_costs", "promotions"):
        assert len(catalog(home).rows(table)) == len(catalog(reference.home).rows(table)), (told, table)
    assert not list(home.glob("policies/.draft*")), told
    num_curves = len({row["mlflow_run_id"] for row in reference.document["curves"]})
    assert _num_curve_runs(json.loads(again.stdout)["mlflow_tracking_uri"]) == num_curves, told


def _num_curve_runs(uri: str) -> int:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return len(client.search_runs(experiments, "tags.`kvp.stage` = 'curve'"))


@pytest.mark.slow
def test_two_at_once_in_a_new_home_both_end_well(embedded_model_folder, tmp_path):
    # Each with a server of its own, of one new database.
    command = ["kvp", "collect", "--preset", "smoke", "--tasks", "niah_single_1", "--home", str(tmp_path / "home")]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    processes = [start_process(command, log=log, env=environment()) for log in logs]
    for process, log in zip(processes, logs, strict=True):
        assert process.wait(timeout=240) == 0, tail(log)
    collections = TraceStore(tmp_path / "home" / "traces").collections()
    assert [found.samples for found in collections.values()] == [5]
    assert TraceStore(tmp_path / "home" / "traces").verify() == []
