"""SIGKILL at random moments, again and again: of the command, of a worker of its pool, of a Ray node, of its server.

A home is worked on until a command ends well there; it must then have what an undisturbed run has, once, and nothing
that counts as running. `KVP_TEST_KILLS` says how many kills there are, and `KVP_TEST_SEED` repeats what was drawn: who
is killed, after how many seconds, under which runner, and which homes have the services of `kvp up`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from outcomes import (
    catalog,
    mlflow_points,
    points_of_home,
    policy_of_home,
    stages_begun_again,
    unfinished_in_prefect,
)
from processes import environment, run_command, start_process, stop_process, tail
from ray_cluster import LOOPBACK_ONLY, RayCluster, ray_cluster

from flows.services.processes import environment_of, recorded
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.mlflow.tracking import Tracking

NUM_KILLS = int(os.environ.get("KVP_TEST_KILLS", "8"))
SEED = int(os.environ.get("KVP_TEST_SEED") or random.SystemRandom().randrange(2**32))
TARGETS = {
    "local": ("command", "server"),
    "processes": ("command", "server", "worker"),
    "ray": ("command", "server", "node"),
}
# Of being drawn: most runs go on without a worker or a node, and are then killed once more.
WEIGHTS = {"command": 2, "server": 2, "worker": 4, "node": 4}
SERVED_WEIGHTS = {**WEIGHTS, "server": 0.5}  # as `kvp up` takes half a minute
# Little of everything, but several parts in every stage.
SIZES = ("--preset", "smoke", "--tasks", "niah_single_1", "--methods", "kvp,judgeq,random", "--budgets", "32,96")
SETTINGS = (
    "collect.samples_per_fragment=2",
    "train.heads_per_group=2",
    "soft_tokens.num_steps=2",
    "soft_tokens.num_contexts=2",
    "evaluate.examples_per_shard=1",
    "evaluate.num_analysed=1",
    "evaluate.max_answer_tokens=4",
    "evaluate.num_resamples=100",
)
SHARE_SERVED = 0.6  # of homes: `kvp up` takes half a minute, and a command's own server ten seconds
OF_SERVICES = ("services", "prefect", "locks")
MOST_LOSSES = 3  # of workers without progress, after which a command ends
START_TIMEOUT_S, END_TIMEOUT_S = 60.0, 400.0
TABLES = ("scores", "samples", "heads", "head_costs", "findings", "comparisons", "promotions")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def options(small_model) -> tuple[str, ...]:
    """Options of the run."""
    return (*SIZES, *(part for setting in SETTINGS for part in ("--set", setting)), "--model", str(small_model))


@pytest.fixture(scope="module")
def undisturbed(options, tmp_path_factory) -> tuple[Path, float]:
    """The home of that run, without a kill, and the seconds that it took."""
    home, started = tmp_path_factory.mktemp("undisturbed") / "home", time.monotonic()
    finished = run_command(["kvp", "run", *options, "--home", str(home)], env=environment(), timeout_s=END_TIMEOUT_S)
    assert finished.code == 0, finished.stderr
    return home, time.monotonic() - started


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """A Ray cluster of two nodes."""
    with ray_cluster(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.fixture
def served(tmp_path):
    """A home whose services run."""
    home = tmp_path / "served"
    _kvp("up", home=home)
    yield home
    _kvp("down", home=home)


def _kvp(*verb: str, home: Path) -> dict[str, Any]:
    """What `kvp up`, `down` or `status` says."""
    done = run_command(["kvp", *verb, "--home", str(home), "--json"], env=environment(), timeout_s=END_TIMEOUT_S)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)


@dataclass(kw_only=True)
class Work:
    """A home that commands work on until one of them ends well.

    Attributes:
        name: For logs.
        home: The home.
        options: Of the commands.
        cluster: The Ray cluster that they may use.
        is_served: Whether they use the server of `kvp up`; else each has its own.
        draws: Of who is killed, and when.
        most_delay_s: How long it may take until one is killed; of a worker, from when there is one.
        killed: How many of each were killed.
        told: What has happened, for whoever reads that an assertion failed.
    """

    name: str
    home: Path
    options: tuple[str, ...]
    cluster: RayCluster
    is_served: bool
    draws: random.Random
    most_delay_s: dict[str, float]
    killed: Counter[str]
    told: list[str] = field(default_factory=lambda: [f"KVP_TEST_SEED={SEED}"])

    def run(self, most_kills: int) -> bool:
        """Run the command and kill, until it ends or there were so many kills; whether it ended well."""
        runner, kills = self.draws.choice(list(TARGETS)), []
        address = ()
        if runner == "ray":
            self.cluster.ensure_node()
            address = ("--runner-address", self.cluster.address)
        log = self.home.parent / f"{self.name}.{len(self.told)}.log"
        command = ["kvp", "run", *self.options, "--runner", runner, *address, "--home", str(self.home)]
        process = start_process(command, log=log, env=environment(**LOOPBACK_ONLY))
        started = time.monotonic()
        try:
            # Without its own server a command comes to an end, and `kvp up` starts the other one again.
            deadly = {"command"} if self.is_served else {"command", "server"}
            while process.poll() is None and len(kills) < most_kills and not deadly & {*kills}:
                kills += self._kill(self._draw_target(runner), process)
            process.wait(timeout=END_TIMEOUT_S)
        except BaseException:
            stop_process(process, timeout_s=1.0)
            raise
        if kills[-1:] == ["command"] and process.returncode == 0:
            kills.pop()  # it was about to end
        self._tell(f"{runner}: ended with {process.returncode} after {time.monotonic() - started:.0f} s: {_end(log)}")
        self._require_good_end(kills, process.returncode, log)
        self.killed.update(kills)
        return process.returncode == 0

    def _draw_target(self, runner: str) -> str:
        weights = SERVED_WEIGHTS if self.is_served else WEIGHTS
        return self.draws.choices(TARGETS[runner], [weights[target] for target in TARGETS[runner]])[0]

    def _kill(self, target: str, process: "subprocess.Popen[bytes]") -> list[str]:
        """Kill what is meant, some time after there is such a thing; nothing if it ends before."""
        if target == "node":
            self.cluster.ensure_node()
        deadline, delay_s = time.monotonic() + START_TIMEOUT_S, self.draws.uniform(0, self.most_delay_s[target])
        while process.poll() is None and not self._victims(target, process) and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=delay_s)
            return []
        told = f"{target} killed after {delay_s:.1f} s"
        if target == "node":
            told += f", on which ran {self.cluster.kill_node()}"
        else:
            try:
                os.kill(self.draws.choice(self._victims(target, process)), signal.SIGKILL)
            except (IndexError, ProcessLookupError):
                return []
        self._tell(told)
        if target == "server" and self.is_served:
            _kvp("up", home=self.home)
        return [target]

    def _victims(self, target: str, process: "subprocess.Popen[bytes]") -> list[int]:
        """Processes any of which may be killed; of a node only whether there is one."""
        if target in ("command", "node"):
            return [process.pid]
        if target == "server" and self.is_served:
            server = recorded(Home.open(self.home, create=False), "server")
            return [server.pid] if server is not None and server.runs else []
        named = "flows.services.prefect_server" if target == "server" else "spawn_main"
        try:
            children = psutil.Process(process.pid).children()
            return [child.pid for child in children if named in " ".join(child.cmdline())]
        except psutil.NoSuchProcess:
            return []

    def _require_good_end(self, kills: list[str], code: int, log: Path) -> None:
        if kills[-1:] == ["command"]:
            assert code == -signal.SIGKILL, (self.told, tail(log))
        elif code != 0:  # one line, and the same command goes on
            assert code == 1 and _end(log).startswith("kvp: "), (self.told, tail(log))
            assert kills and (set(kills) != {"worker"} or len(kills) > MOST_LOSSES), (self.told, tail(log))
        assert "Traceback" not in log.read_text(errors="replace"), (self.told, log)

    def require_whole(self, reference: Path) -> None:
        """Everything is there, once, and nothing counts as running."""
        home, told = self.home, self.told
        assert policy_of_home(home) == policy_of_home(reference), told
        assert points_of_home(home) == points_of_home(reference), told
        assert stages_begun_again(home) == [], told
        for table in TABLES:
            assert len(catalog(home).rows(table)) == len(catalog(reference).rows(table)), (told, table)
        assert mlflow_points(home) == mlflow_points(reference), told
        # What ended a moment ago is still on its way to the server, and counts as lost only when it has had time.
        deadline = time.monotonic() + 20
        while unfinished_in_prefect(home) and time.monotonic() < deadline:
            time.sleep(1)
        if unfinished_in_prefect(home):
            status = _kvp("status", "--recover", home=home)
            assert status["flow_runs"] == status["orphans"] == [], (told, status)
        assert unfinished_in_prefect(home) == [], told

    def left_running(self) -> list[int]:
        """What still runs of all that the commands started, after it had time to end."""
        deadline, told_home = time.monotonic() + 30, str(Home.open(self.home).prefect)
        while True:
            around = {pid: environment_of(pid) for pid in psutil.pids()}
            found = [
                pid
                for pid, env in around.items()
                if env.get("PREFECT_HOME") == told_home and "KVP_SERVICE_TOKEN" not in env
            ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _tell(self, what: str) -> None:
        self.told.append(what)
        print(f"{self.name}: {what}", flush=True)


def _end(log: Path) -> str:
    """The last line of a log."""
    return (log.read_text(errors="replace").strip().splitlines() or ["nothing was said"])[-1]


def test_kills_at_random_moments_lose_and_double_nothing(options, undisturbed, two_nodes, served, tmp_path):
    draws, (reference, whole_s) = random.Random(SEED), undisturbed
    print(f"KVP_TEST_SEED={SEED}, {whole_s:.0f} s without a kill", flush=True)
    killed: Counter[str] = Counter()
    num_works = num_commands = 0
    while killed.total() < NUM_KILLS:
        is_served = draws.random() < SHARE_SERVED
        work = Work(
            name=f"work{num_works}",
            home=served if is_served else tmp_path / f"home{num_works}",
            options=options,
            cluster=two_nodes,
            is_served=is_served,
            draws=draws,
            most_delay_s={
                "command": 0.7 * whole_s,
                "server": 0.7 * whole_s,
                "node": 0.7 * whole_s,
                "worker": 0.3 * whole_s,
            },
            killed=killed,
        )
        num_works, done = num_works + 1, False
        while not done:
            num_commands, done = num_commands + 1, work.run(NUM_KILLS - killed.total())
        work.require_whole(reference)
        assert work.left_running() == [], work.told
        for entry in work.home.iterdir():
            if entry.is_dir() and not (is_served and entry.name in OF_SERVICES):
                shutil.rmtree(entry)  # the next one begins anew
    assert NUM_KILLS < 30 or {*killed} == {"command", "worker", "node", "server"}, killed
    # What was done, for `make test-slow` with -s.
    told = ", ".join(f"{number} of a {target}" for target, number in sorted(killed.items()))
    print(f"{killed.total()} kills ({told}) in {num_commands} commands and {num_works} runs; seed {SEED}")


def test_what_is_done_or_logged_again_is_seen(small_run, tmp_path):
    home = Home.open(shutil.copytree(small_run.home, tmp_path / "home"))

    def run(*, fails: bool) -> str:
        about = {"stage": "some stage", "parameters": {}, "inputs": {}, "code_fingerprint": "0" * 64}
        with suppress(RuntimeError), Catalog(home).record_run(stage_key="some key", **about) as recorded:
            if fails:
                raise RuntimeError("it fails")
        return recorded.run_id

    run(fails=True)
    run(fails=False)
    assert stages_begun_again(home.path) == []
    again = {run(fails=True), run(fails=False)}
    assert set(stages_begun_again(home.path)) == again

    before = mlflow_points(home.path)
    assert before == mlflow_points(small_run.home)
    metric, step = next(entry[2:] for entry in before if entry[2] == "heldout_cost")
    trained = next(row["mlflow_run_id"] for row in catalog(home.path).rows("runs") if row["stage"] == "train")
    Tracking(home).log_training(trained, [(metric, step, 0.5)], timestamp_ms=1)
    assert (mlflow_points(home.path) - before).total() == 1
