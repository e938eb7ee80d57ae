"""SIGKILL at random moments, again and again: of the command, of one of its workers, of its server.

A home is worked on until its run ends; it must then have what an undisturbed run has, once, and no flow run that counts
as running. A kill takes about a minute with what follows it; `KVP_TEST_KILLS` says how many there are.
"""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from outcomes import catalog, points_of_home, policy_of_home
from processes import environment, run_command, start_process, stop_process, tail

NUM_KILLS = int(os.environ.get("KVP_TEST_KILLS", "8"))
TARGETS = ("command", "worker", "server")
MOST_DELAY_S, END_TIMEOUT_S = 20.0, 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture
def homes(tmp_path):
    """Gives new homes with services of their own, and ends these."""
    made: list[Path] = []

    def make() -> Path:
        home = tmp_path / f"home{len(made)}"
        made.append(home)
        _services(home, "up")
        return home

    yield make
    for home in made:
        _services(home, "down")


def _services(home: Path, *verb: str) -> dict[str, Any]:
    done = run_command(["kvp", *verb, "--home", str(home), "--json"], env=environment(), timeout_s=END_TIMEOUT_S)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


def _kill(target: str, process: subprocess.Popen[bytes], home: Path) -> bool:
    """Kill what is meant; whether there was one."""
    victim = process.pid
    if target == "worker":
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]
        if not workers:
            return False
        victim = random.choice(workers)
    elif target == "server":
        states = {service["name"]: service for service in _services(home, "status")["services"]}
        victim = states["server"]["pid"]
    os.kill(victim, signal.SIGKILL)
    return True


def test_kills_at_random_moments_lose_and_double_nothing(small_run, homes, tmp_path):
    killed, num_ended, told = dict.fromkeys(TARGETS, 0), 0, []
    home = homes()
    while sum(killed.values()) < NUM_KILLS or told:
        target, delay_s = random.choice(TARGETS), random.uniform(0, MOST_DELAY_S)
        log = tmp_path / f"log{num_ended}"
        options = [*small_run.options, "--runner", "processes" if target == "worker" else "local"]
        process = start_process(["kvp", "run", *options, "--home", str(home)], log=log, env=environment())
        try:
            process.wait(timeout=delay_s if sum(killed.values()) < NUM_KILLS else END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            try:
                hit = _kill(target, process, home)
            except (ProcessLookupError, psutil.NoSuchProcess):
                hit = False  # it has just ended
            killed[target] += hit
            told += [f"{target} after {delay_s:.2f} s"] * hit
            if target == "server" and hit:
                process.wait(timeout=END_TIMEOUT_S)
                _services(home, "up")
            elif target == "worker":
                process.wait(timeout=END_TIMEOUT_S)
        stop_process(process, timeout_s=1.0)
        if process.returncode == 0:
            _require_whole(home, small_run, told)
            num_ended, told = num_ended + 1, []
            home = homes() if sum(killed.values()) < NUM_KILLS else home
        else:
            assert process.returncode < 0 or target == "server", (told, tail(log))
    assert num_ended and (NUM_KILLS < 30 or all(killed.values())), killed


def _require_whole(home: Path, reference: Any, told: list[str]) -> None:
    assert policy_of_home(home) == reference.document["policy_set"]["id"], told
    assert points_of_home(home) == points_of_home(reference.home), told
    twice = "SELECT stage_key FROM runs WHERE outcome = 'completed' GROUP BY stage_key HAVING count(*) > 1"
    assert catalog(home).sql(twice).num_rows == 0, told
    for table in ("scores", "samples", "heads", "head_costs", "findings", "comparisons"):
        assert len(catalog(home).rows(table)) == len(catalog(reference.home).rows(table)), (told, table)
    curves = {row["mlflow_run_id"] for row in catalog(home).rows("curves")}
    assert len(curves) == len({row["mlflow_run_id"] for row in reference.document["curves"]}), told
    deadline = time.monotonic() + 60
    while (status := _services(home, "status", "--recover"))["flow_runs"] and time.monotonic() < deadline:
        time.sleep(1)  # what ended a moment ago is still on its way to the server
    assert status["flow_runs"] == status["orphans"] == [], (told, status)
