"""`kvp up`, `kvp status` and `kvp down`: real services, killed and found again, and nobody else's process touched."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from outcomes import assert_refused
from processes import CHECKOUT, environment, last_line, run_command, start_process, tail

from flows.services import processes, recovery, work_pool
from flows.services.processes import environment_of, folder, recorded, start, stop
from flows.services.recovery import MARK, prefect_client, recover
from storage.home import Home, exclusive

NAMES = ["server", "mlflow", "worker"]
# Says its own child's number, and waits; the child is in another session, as a worker's flow runs are.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


def test_deployments_are_those_of_the_checkout():
    assert (work_pool.CHECKOUT / "prefect.yaml").samefile(CHECKOUT / "prefect.yaml")


@pytest.fixture
def stranger():
    """A process that no service started."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def _started(home: Home, script: str) -> processes.Service:
    return start(home, "server", [sys.executable, "-c", script], url="http://127.0.0.1:1", env=os.environ)


def _said(service: processes.Service) -> str:
    deadline = time.monotonic() + 20
    while not (said := Path(service.log).read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return said


def test_a_service_is_ended_with_all_that_it_started(home, stranger):
    service = _started(home, PARENT)
    child = int(_said(service))
    assert recorded(home, "server") == service
    assert service.runs and sorted(service.processes()) == sorted([service.pid, child])
    os.kill(service.pid, signal.SIGKILL)
    os.waitpid(service.pid, 0)
    assert not service.runs and service.processes() == [child]  # what it left behind is its own still
    stop(home, service)
    assert environment_of(child) == {}
    assert recorded(home, "server") is None
    assert stranger.poll() is None


def test_a_process_that_was_given_the_number_later_is_left_alone(home, stranger):
    service = dataclasses.replace(_started(home, "pass"), pid=stranger.pid)
    assert not service.runs
    stop(home, service)
    time.sleep(0.2)
    assert stranger.poll() is None


def test_an_environment_is_read_beyond_an_empty_entry():
    """A process that sets its title leaves one; Python refuses to start a program so."""
    program = (
        "import ctypes; sleep, libc = b'/bin/sleep', ctypes.CDLL(None);"
        " texts = lambda *values: (ctypes.c_char_p * (len(values) + 1))(*values);"
        " libc.execve(sleep, texts(sleep, b'60'), texts(b'A=1', b'', b'B=2'))"
    )
    with subprocess.Popen([sys.executable, "-c", program], env={"C": "3"}) as process:
        try:
            while "C" in (read := environment_of(process.pid)) or not read:
                assert process.poll() is None
                time.sleep(0.01)
            assert read == {"A": "1", "B": "2"}
        finally:
            process.kill()


def test_a_copy_of_a_home_has_no_services(home, tmp_path):
    service = _started(home, DEAF)
    copy = Home.open(shutil.copytree(home.path, tmp_path / "copy"))
    assert (recorded(home, "server"), recorded(copy, "server")) == (service, None)
    os.kill(service.pid, signal.SIGKILL)
    stop(home, service)


def test_a_service_that_does_not_listen_is_killed(home, monkeypatch):
    monkeypatch.setattr(processes, "_STOP_TIMEOUT_S", 0.5)
    service = _started(home, DEAF)
    assert _said(service) == "deaf\n"
    stop(home, service)
    assert service.processes() == []


def test_only_flow_runs_of_the_dead_are_noted_as_crashed(home, prefect_api):
    """A command that is dead, whose flow run has another one in it; one that lives; and others that nobody knows."""
    from prefect import flow
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Running
    from prefect.tasks import Task

    alive, dead = "command-alive", "command-dead"
    with exclusive(home, dead):
        pass

    @flow
    def some_flow() -> None:
        """Never called: the server is told of its runs."""

    with temporary_settings({PREFECT_API_URL: prefect_api}), exclusive(home, alive), prefect_client() as client:

        def running(*marks: str, parent: Any = None) -> str:
            run = client.create_flow_run(some_flow, state=Running(), tags=marks, parent_task_run_id=parent)
            return str(run.id)

        ours, theirs, unknown = running(MARK + dead), running(MARK + alive), running("kvpolicy")
        elsewhere = running(f"{MARK}command-of-another-home")
        task = client.create_task_run(Task(some_flow.fn), flow_run_id=ours, dynamic_key="0", state=Running())
        within = running(parent=task.id)
        assert {run.flow_run_id for run in recover(home)} == {ours, within}
        assert client.read_task_run(task.id).state.is_crashed()
        states = {run: client.read_flow_run(run).state.type.value for run in (ours, theirs, unknown, elsewhere)}
        assert states == {ours: "CRASHED", theirs: "RUNNING", unknown: "RUNNING", elsewhere: "RUNNING"}
        assert recover(home) == []
        for run in (theirs, unknown, elsewhere):
            client.delete_flow_run(run)
    assert not (home.path / "locks" / dead).exists()


def test_task_runs_without_which_their_flow_run_has_ended_are_noted_as_crashed(home, prefect_api, monkeypatch):
    """As of a worker of a pool that was lost: one that is ending, one long after, and one whose flow run goes on."""
    from prefect import flow
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Completed, Running
    from prefect.tasks import Task

    @flow
    def some_flow() -> None:
        """Never called: the server is told of its runs."""

    with temporary_settings({PREFECT_API_URL: prefect_api}), prefect_client() as client:

        def task_of(run: Any) -> Any:
            task = client.create_task_run(Task(some_flow.fn), flow_run_id=run.id, dynamic_key="0", state=Running())
            return lambda: client.read_task_run(task.id).state.type.value

        ended, running = (client.create_flow_run(some_flow, state=Running()) for _ in range(2))
        lost, at_work = task_of(ended), task_of(running)
        client.set_flow_run_state(ended.id, Completed(), force=True)
        recover(home)
        assert (lost(), at_work()) == ("RUNNING", "RUNNING")  # its end may still be on its way
        monkeypatch.setattr(recovery, "_NEWS_TAKES", timedelta(0))
        recover(home)
        assert (lost(), at_work()) == ("CRASHED", "RUNNING")
        assert client.read_flow_run(ended.id).state.is_completed()
        client.delete_flow_run(running.id)


def _kvp(*args: str, home: Path, timeout_s: float = 300, **variables: str):
    return run_command(["kvp", *args, "--home", str(home)], env=environment(**variables), timeout_s=timeout_s)


def _answer(home: Path, *args: str):
    done = _kvp(*args, "--json", home=home)
    assert done.code == 0, last_line(done.stderr)
    return json.loads(done.stdout)


def test_what_is_not_up_is_said_and_cannot_be_ended(home):
    found = _answer(home.path, "status")
    assert [(service["name"], service["state"]) for service in found["services"]] == [
        (name, "stopped") for name in NAMES
    ]
    assert (found["api_url"], found["orphans"]) == ("", [])
    assert _kvp("down", home=home.path).stdout == "nothing runs\n"
    assert_refused(_kvp("status", home=home.path / "none"), "no home at")


def test_what_is_in_the_way_of_services_is_one_line(home, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(_kvp("up", "--port", str(port), home=home.path), f"port {port} is in use")
    assert not list(folder(home).glob("*.json"))
    elsewhere = _kvp("up", home=home.path, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert_refused(elsewhere, "PREFECT_API_URL names the server http://127.0.0.1:9/api", "unset it")
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "services").symlink_to("/dev/null/none")
    assert_refused(_kvp("up", home=tmp_path / "blocked"), str(tmp_path / "blocked" / "services"))


@pytest.mark.slow
def test_a_server_that_dies_as_it_starts_is_one_line(home):
    home.prefect.mkdir()
    with closing(sqlite3.connect(home.prefect / "prefect.db")) as connection:  # of a release of Prefect to come
        connection.execute("CREATE TABLE alembic_version (version_num varchar(32))")
        connection.execute("INSERT INTO alembic_version VALUES ('ffffffffffff')")
        connection.commit()
    log = folder(home) / "server.log"
    assert_refused(_kvp("up", home=home.path), "server of `kvp up` died", "revision identified by 'ffff", str(log))
    assert not list(folder(home).glob("*.json"))
    assert [pid for pid in psutil.pids() if str(log) in str(environment_of(pid))] == []


@pytest.fixture
def running(home):
    """A home whose services run."""
    yield home.path
    _kvp("down", home=home.path)


def _pids(found) -> dict[str, int | None]:
    return {service["name"]: service["pid"] for service in found["services"]}


def _get(url: str):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.status, answer.read()


def _flow_runs(found, name: str) -> list[str]:
    body = json.dumps({"flows": {"name": {"any_": [name]}}}).encode()
    request = urllib.request.Request(f"{found['api_url']}/flow_runs/filter", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return [run["state_type"] for run in json.load(answer)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_services_live_until_they_are_ended_whatever_dies(running, stranger, tmp_path):
    first = _answer(running, "up")
    assert all(service["started"] and service["state"] == "running" for service in first["services"])
    assert {"retrain/retrain", "collect/collect", "train/train", "evaluate/evaluate"} <= set(first["deployments"])
    server, mlflow, _ = (service["url"] for service in first["services"])
    assert [_get(place)[0] for place in (server, mlflow, f"{first['api_url']}/ready")] == [200] * 3
    assert first["api_url"].encode() in _get(f"{server}/ui-settings")[1]

    # Commands use the server without being told of it, and so do Prefect's own when they are.
    assert_refused(_kvp("train", "--preset", "smoke", home=running), "kvp collect --preset smoke")
    assert _flow_runs(first, "train") == ["FAILED"]
    deployed = run_command(
        ["prefect", "deployment", "run", "evaluate/evaluate", "-p", "preset=smoke", "--watch"],
        env=environment(PREFECT_API_URL=first["api_url"]),
        timeout_s=180,
    )
    assert _flow_runs(first, "evaluate") == ["FAILED"], last_line(deployed.stdout)  # in this home nothing is trained

    # A command that is killed leaves an orphan, which is named, and then noted as crashed.
    log = tmp_path / "log"
    command = start_process(["kvp", "collect", "--home", str(running)], log=log, env=environment())
    deadline = time.monotonic() + 120
    while not _answer(running, "status")["flow_runs"]:
        assert command.poll() is None and time.monotonic() < deadline, tail(log)
    command.kill()
    command.wait()
    (orphan,) = _answer(running, "status")["orphans"]
    assert orphan["state"] == "Running"
    recovered = _answer(running, "status", "--recover")
    assert [run["flow_run_id"] for run in recovered["recovered"]] == [orphan["flow_run_id"]]
    assert (recovered["orphans"], recovered["flow_runs"]) == ([], [])
    assert _flow_runs(first, "collect") == ["CRASHED"]

    # A server that is killed comes back where it was, for those that use it; the others stay.
    os.kill(_pids(first)["server"], signal.SIGKILL)
    found = _answer(running, "status")
    assert [service["state"] for service in found["services"]] == ["dead", "running", "running"]
    second = _answer(running, "up")
    assert [service["started"] for service in second["services"]] == [True, False, False]
    assert second["api_url"] == first["api_url"]
    assert {**_pids(second), "server": None} == {**_pids(first), "server": None}
    third = _answer(running, "up")
    assert _pids(third) == _pids(second) and not any(service["started"] for service in third["services"])

    assert set(_answer(running, "down")["ended"]) == set(NAMES)
    assert [environment_of(pid) for pid in _pids(third).values()] == [{}] * 3
    assert stranger.poll() is None
    assert _kvp("down", home=running).stdout == "nothing runs\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_that_dies_with_its_flow_run_leaves_no_orphan(running):
    first = _answer(running, "up")
    run_command(
        ["prefect", "deployment", "run", "collect/collect"],
        env=environment(PREFECT_API_URL=first["api_url"]),
        timeout_s=180,
    )
    deadline = time.monotonic() + 120
    while [run["state"] for run in _answer(running, "status")["flow_runs"]] != ["Running"]:
        assert time.monotonic() < deadline
    worker = recorded(Home.open(running), "worker")
    for pid in worker.processes():
        os.kill(pid, signal.SIGKILL)
    (orphan,) = _answer(running, "status")["orphans"]
    second = _answer(running, "up")
    assert [service["started"] for service in second["services"]] == [False, False, True]
    assert [run["flow_run_id"] for run in second["recovered"]] == [orphan["flow_run_id"]]
    assert (second["orphans"], second["flow_runs"]) == ([], [])
    assert _flow_runs(second, "collect") == ["CRASHED"]
