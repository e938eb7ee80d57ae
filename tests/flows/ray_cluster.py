"""A Ray cluster of two nodes on loopback: a program that lives as long as its standard input, and how tests run it.

The program says the cluster's address. A line `kill` ends the second node as a machine ends that loses its power, with
all that runs on it; `start` gives the cluster another one. Each is answered by a line.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import CHECKOUT, environment

LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # also of commands that are to find it
IDLE = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


class RayCluster:
    """The cluster of a program that runs."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._is_whole = True
        self.address = self._answer()

    def kill_node(self) -> str:
        """Kill the second node; gives what ran on it."""
        self._is_whole = False
        return self._ask("kill")

    def ensure_node(self) -> None:
        """Start another second node if it was killed, and wait until the cluster has it."""
        if not self._is_whole:
            self._ask("start")
        self._is_whole = True

    def _ask(self, what: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer, "the Ray cluster of the tests has died"
        return answer


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Run a cluster, each node with room for one part."""
    program = [sys.executable, str(Path(__file__)), os.environ["OMP_NUM_THREADS"]]
    pipe = subprocess.PIPE
    with (
        (folder / "ray.log").open("w") as log,
        subprocess.Popen(
            program, env=environment(), cwd=CHECKOUT, stdin=pipe, stdout=pipe, stderr=log, text=True
        ) as process,
    ):
        yield RayCluster(process)


def main(cpus_per_node: int) -> None:
    """Start the nodes, print `HOST:PORT`, and do what is asked."""
    os.environ.update(LOOPBACK_ONLY, RAY_USAGE_STATS_ENABLED="0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cpus_per_node, "object_store_memory": 128 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    second = cluster.add_node(**node)
    _say(cluster.address)
    for line in sys.stdin:
        if line == "kill\n":
            _say(_kill(second))
        else:
            cluster.remove_node(second, allow_graceful=False)  # what is noted of it
            second = cluster.add_node(**node)
            _say("started")
    cluster.shutdown()


def _kill(node: Any) -> str:
    import psutil

    ((started,),) = [processes for kind, processes in node.all_processes.items() if kind == "raylet"]
    raylet = psutil.Process(started.process.pid)
    raylet.suspend()  # so that it starts nothing while its children are listed
    victims = [*raylet.children(recursive=True), raylet]
    titles = ["".join(victim.cmdline()).strip() for victim in victims]
    for victim in victims:
        victim.kill()
    started.process.wait()
    ran = [title.removeprefix("ray::") for title in titles if title.startswith("ray::") and title not in IDLE]
    return ", ".join(ran) or "nothing"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(int(sys.argv[1]))
