"""Ray: a cluster at an address, or one of this command's own on this machine."""

import logging
import warnings
from contextlib import ExitStack
from typing import Any

from flows.runners.clusters import address_of, refusing
from flows.runners.engine import Engine, passed_on, workers_here
from flows.runtime.process import environment_with
from flows.runtime.run_options import Runner


def start_ray(runner: Runner, stack: ExitStack, threads: int) -> Engine:
    """Join the cluster, or start one; the stack leaves it or ends it.

    Raises:
        InputError: If it does not start.
    """
    address = address_of(runner)
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
        "runtime_env": {"env_vars": passed_on()},
    }
    variables = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address is None:
        options |= {"num_cpus": workers_here(runner, threads) * threads, "include_dashboard": False}
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # so that, on any system, it listens on loopback only
    stack.enter_context(environment_with(**variables))
    import ray
    from prefect_ray import RayTaskRunner
    from prefect_ray.context import remote_options

    with refusing(runner, address), warnings.catch_warnings():
        # Lance warns of every fork; Ray's becomes another program at once.
        warnings.filterwarnings("ignore", message="lance is not fork-safe")
        # Given no address at all, Ray would join whatever cluster was started on this machine last.
        task_runner = stack.enter_context(RayTaskRunner(address=address or "local", init_kwargs=options))
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = max(1, min(threads, int(max(node.get("CPU", 0) for node in nodes))))
    has_gpus = any(node.get("GPU", 0) for node in nodes)
    gpu_bytes = ray.get(ray.remote(num_gpus=0.01)(_gpu_bytes).remote()) if has_gpus else 0
    return Engine(
        name=runner.name,
        task_runner=task_runner,
        num_slots=max(1, sum(int(node.get("CPU", 0) // cpus) for node in nodes)),
        lost_worker=(ray.exceptions.RayError,),
        heals=True,
        asking=lambda share: remote_options(num_cpus=cpus, **({"num_gpus": share} if has_gpus else {})),
        gpu_bytes=gpu_bytes,
    )


def _gpu_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
