"""Runners: what they refuse, what happens to parts and workers, and that all of them come to the same results."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from outcomes import PROGRESS, assert_refused, catalog, points_of_home, policy_of_home
from prefect import flow
from processes import CHECKOUT, environment, free_port, run_command, start_process, stop_process
from ray_cluster import LOOPBACK_ONLY, RayCluster, ray_cluster

from flows.runners.clusters import check_runner
from flows.runners.engagement import engaged
from flows.runners.fan_out import run_parts
from flows.runners.gpu_share import gpu_share
from flows.runtime.run_options import Runner
from kvpolicy.errors import InputError
from kvpolicy.presets.pipeline_config import load_preset
from tasks.training_memory import training_bytes
from tests.flows.parts import echo, look_around, refuse

# More parts than workers, and several of every stage.
PARTS = (
    "collect.samples_per_fragment=2",
    "train.heads_per_group=2",
    "evaluate.num_samples=3",
    "evaluate.examples_per_shard=1",
)
SETTINGS = tuple(part for setting in PARTS for part in ("--set", setting))


@flow(name="some-parts")
def some_parts(runner: Runner, parts: list[partial]) -> list:
    with engaged(runner):
        return run_parts("some parts", parts)


def test_a_runner_is_checked_when_it_is_chosen():
    for wrong, said in (
        ({"name": "spark"}, "'spark', expected one of local, processes, ray, dask"),
        ({"name": "processes", "address": "here:1"}, "has no address"),
        ({"name": "local", "num_workers": 2}, "runner local has 2 workers"),
        ({"name": "processes", "num_workers": 0}, "has 0 workers, expected 1 or more"),
    ):
        with pytest.raises(InputError, match=said):
            Runner(**wrong)


@pytest.mark.parametrize(("name", "module"), [("ray", "prefect_ray"), ("dask", "distributed")])
def test_an_engine_that_is_not_installed_is_one_line(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # as Python remembers what is not there
    with pytest.raises(InputError, match=rf"runner {name} needs {module}: .*'kvpolicy\[{name}\]'"):
        check_runner(Runner(name=name))
    check_runner(Runner(name="processes"))


@pytest.mark.parametrize("runner", ["ray", "dask"])
def test_an_address_that_nobody_answers_is_one_line_before_a_home_is_made(kvp_here, tmp_path, runner):
    home = tmp_path / "home"
    given = ("run", "--preset", "smoke", "--runner", runner, "--runner-address")
    assert_refused(
        kvp_here(*given, "127.0.0.1:9", home=home), f"no {runner.capitalize()} cluster answers at 127.0.0.1:9"
    )
    assert_refused(kvp_here(*given, "nowhere", home=home), "'nowhere', expected host:port")
    assert not home.exists()


def test_without_a_runner_parts_run_here_in_their_order_until_one_fails(prefect_here):
    parts = [partial(echo, value) for value in range(3)]
    assert some_parts(Runner(), parts) == [0, 1, 2]
    assert some_parts(Runner(), [partial(look_around)])[0][0] == os.getpid()
    with pytest.raises(InputError, match="value is 7"):
        some_parts(Runner(), [partial(refuse, 7), partial(refuse, 8)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_lose_a_worker_and_go_on_and_tell_what_failed(server_environment, tmp_path):
    env = {**server_environment, "OMP_NUM_THREADS": "1"}
    program = "from tests.flows.parts import main; main()"  # the module under its own name, so that its code is found
    done = run_command(["python", "-c", program, str(tmp_path)], env=env, timeout_s=600)
    assert done.code == 0, done.stderr
    told = json.loads(done.stdout)
    pid, threads, variable = told["worker"]
    assert (pid != told["flow"], threads, variable) == (True, 1, "1")
    assert told["died once"] == [0, 1, 2, 3, 1]
    assert told["refused"] == "value is 7, expected another"
    assert told["left"] == "nothing listens"  # and nothing waits for ever
    assert told["died often"].startswith("runner processes lost workers again and again (BrokenProcessPool")
    assert len(list((tmp_path / "often").iterdir())) == 4  # three times more, not for ever


@pytest.mark.slow
def test_ctrl_c_ends_a_pool_of_processes_at_once_and_without_tracebacks(server_environment, tmp_path):
    program, log = "from tests.flows.parts import be_interrupted; be_interrupted()", tmp_path / "log"
    process = start_process(["python", "-c", program, str(tmp_path)], log=log, env=server_environment)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "sign").exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        stop_process(process)
    said = log.read_text()
    assert said.endswith("interrupted") and "Traceback" not in said, said


@pytest.fixture(scope="module")
def options(small_run) -> tuple[str, ...]:
    """Options of a small run with several parts in every stage."""
    return (*small_run.options, *SETTINGS)


@pytest.fixture(scope="module")
def local_home(kvp, options, tmp_path_factory) -> Path:
    """The home of that run, where all parts ran in the process of the command."""
    home = tmp_path_factory.mktemp("local") / "home"
    finished = kvp("run", *options, home=home, timeout_s=300)
    assert finished.code == 0, finished.stderr
    return home


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory) -> Iterator[RayCluster]:
    """A Ray cluster of two nodes, each with room for one part."""
    with ray_cluster(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def dask_cluster(tmp_path_factory) -> Iterator[Callable[..., str]]:
    """Starts a Dask scheduler with one worker, with variables of its own, and gives its address."""
    started = []

    def start(*, nthreads: int = 1, **variables: str) -> str:
        folder, port = tmp_path_factory.mktemp("dask"), free_port()
        env, address = environment(**variables), f"127.0.0.1:{port}"
        scheduler = ["dask", "scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]
        worker = ["dask", "worker", address, "--host", "127.0.0.1", "--nthreads", str(nthreads), "--no-dashboard"]
        for name, command in (("scheduler", scheduler), ("worker", [*worker, "--local-directory", str(folder)])):
            started.append(start_process(command, log=folder / name, env=env))
        return address

    yield start
    for process in reversed(started):
        stop_process(process)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runner", ["processes", "ray", "dask"])
def test_every_runner_comes_to_the_same_bytes(kvp, options, local_home, two_nodes, tmp_path, runner):
    given = {"ray": ("--runner-address", two_nodes.address)}.get(runner, ("--runner-workers", "2"))
    finished = kvp("run", *options, "--runner", runner, *given, home=tmp_path, timeout_s=420, **LOOPBACK_ONLY)
    assert finished.code == 0, finished.stderr
    told = finished.stderr.splitlines()
    assert [line for line in told if not PROGRESS.match(line)] == []
    whole = r".*run: collect (\d+)/\1, train (\d+)/\2, train soft tokens 1/1, evaluate (\d+)/\3"
    assert re.fullmatch(whole, told[-1])
    assert policy_of_home(tmp_path) == policy_of_home(local_home)
    assert points_of_home(tmp_path) == points_of_home(local_home)
    keys = [{(row["stage"], row["stage_key"]) for row in catalog(home).rows("runs")} for home in (tmp_path, local_home)]
    assert keys[0] == keys[1]
    again = kvp("run", *options, "--json", home=tmp_path)  # what one runner made, another finds
    assert again.code == 0, again.stderr
    assert all(stage["skipped"] for name, stage in json.loads(again.stdout)["stages"].items() if name != "prepare")


@pytest.mark.slow
def test_a_worker_with_other_code_refuses_in_one_line(kvp, options, dask_cluster, tmp_path):
    other = tmp_path / "other"
    for package in ("kvpolicy", "tasks", "storage", "flows", "dashboards"):
        shutil.copytree(CHECKOUT / package, other / package)
    with (other / "tasks" / "collect.py").open("a") as stream:
        stream.write("\nANOTHER_VERSION = True\n")
    address = dask_cluster(PYTHONPATH=str(other))
    home = tmp_path / "home"
    said = kvp("run", *options, "--runner", "dask", "--runner-address", address, home=home)
    assert_refused(said, "runs other code", "install the same release there, and restart the workers")
    assert {row["stage"] for row in catalog(home).rows("runs")} <= {"prompts"}


@pytest.mark.slow
def test_dask_workers_that_share_a_model_are_refused(kvp, options, dask_cluster, tmp_path):
    address = dask_cluster(nthreads=2)
    said = kvp("run", *options, "--runner", "dask", "--runner-address", address, home=tmp_path / "home")
    assert_refused(said, f"Dask cluster at {address}", "--nthreads 1")


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["ray", "dask"])
def test_one_who_listens_but_does_not_speak_is_one_line(kvp, options, tmp_path, runner):
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = kvp("run", *options, "--runner", runner, "--runner-address", address, home=tmp_path, timeout_s=90)
    assert_refused(said, f"no {runner.capitalize()} cluster answers at {address}")


def test_head_groups_share_a_gpu_as_far_as_they_fit():
    config, gib = load_preset("paper").train, 2**30
    (four, eight) = (training_bytes(config, num_heads=n, head_dim=128, longest_tokens=4096) for n in (4, 8))
    assert four < eight < 2 * four
    # Keys and values of 128 sequences of 4K tokens alone are 2 GiB for four heads in float32.
    assert gpu_share(four, 80 * gib) > 2 / 80
    small = training_bytes(load_preset("demo").train, num_heads=90, head_dim=64, longest_tokens=1200)
    assert gpu_share(small, 80 * gib) < 0.5
    assert gpu_share(200 * gib, 80 * gib) == gpu_share(None, 80 * gib) == 1.0
    assert gpu_share(1, 80 * gib) == 0.01
