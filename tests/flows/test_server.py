"""The server of a command without one: it starts with the command, and never outlives it."""

import os
import signal
import time
from pathlib import Path

import pytest
from outcomes import assert_refused
from processes import environment, run_command, start_process, stop_process, tail

from flows.runtime.process import point_prefect_at

TRAIN = ("kvp", "train", "--preset", "smoke")


def _children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # gone since it was listed
            continue
        if parent == pid:
            found.append(int(status.parent.name))
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_its_command(tmp_path, number):
    log = tmp_path / "log"
    process = start_process([*TRAIN, "--home", str(tmp_path / "home")], log=log, env=environment())
    try:
        deadline = time.monotonic() + 60
        while not (servers := _children(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline, tail(log)
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(timeout=20)
        deadline = time.monotonic() + 20
        while any(_runs(server) for server in servers):
            assert time.monotonic() < deadline, f"{number.name} left {servers}"
            time.sleep(0.05)
    finally:
        stop_process(process)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert log.read_text() == "kvp: interrupted; run the same command again to go on\n"


@pytest.mark.slow
def test_with_its_own_server_a_failure_is_one_line(tmp_path):
    finished = run_command([*TRAIN, "--home", str(tmp_path / "home")], env=environment(), timeout_s=180)
    assert_refused(finished, "kvp collect --preset smoke")


def test_an_empty_url_names_no_server(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "PREFECT_API_URL": ""})
    point_prefect_at(tmp_path)
    assert "PREFECT_API_URL" not in os.environ
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect")
