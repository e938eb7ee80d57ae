"""Runners: a name becomes one of Prefect's task runners, checked before anything is made and started when first needed.

The one place that knows Ray, Dask and pools of processes. What runs on them is the business of `flows.fan_out`.
"""

import importlib.util
import logging
import multiprocessing
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flows.options import Runner
from flows.process import environment_with
from kvpolicy.errors import InputError

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner

_NEEDS = {"ray": ("ray", "prefect_ray"), "dask": ("distributed", "prefect_dask")}
_ADDRESS_VARIABLE = {"ray": "RAY_ADDRESS", "dask": "DASK_SCHEDULER_ADDRESS"}
_ANSWER_TIMEOUT_S = 5.0
_LOOPBACK = "127.0.0.1"
# What libraries read when they load; workers on other machines do not inherit it.
_PASSED_ON = ("OMP_", "HF_", "KVP_", "TOKENIZERS_", "TQDM_", "TRANSFORMERS_", "PREFECT_LOGGING_", "CUBLAS_")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A started task runner.

    Attributes:
        name: Of the runner.
        task_runner: Prefect's.
        num_slots: Parts that run at once.
        lost_worker: Errors that say that a worker died, not that a part failed.
        heals: Whether the engine gets a new worker by itself, and has tried the part again before it tells of a loss.
        asking: Entered around a submission: asks the engine for what the part needs, such as a share of a GPU.
        gpu_bytes: Memory of one GPU of the workers; 0 where the engine gives out none.
    """

    name: str
    task_runner: "TaskRunner[Any]"
    num_slots: int
    lost_worker: tuple[type[Exception], ...]
    heals: bool
    asking: Callable[[float], AbstractContextManager[Any]] = nullcontext  # which takes no notice of the share
    gpu_bytes: int = 0


@dataclass(kw_only=True)
class _Engagement:
    """A runner that flows may use; its engine starts with the first part, as often there is none to run."""

    runner: Runner
    stack: ExitStack = field(default_factory=ExitStack)
    engine: Engine | None = None


_ENGAGED: ContextVar[_Engagement | None] = ContextVar("engaged", default=None)


def check_runner(runner: Runner) -> None:
    """Refuse a runner that cannot work here. Imports nothing heavy, but Ray for a cluster of Ray.

    Raises:
        InputError: If its engine is not installed, or nobody answers at its address.
    """
    missing = [name for name in _NEEDS.get(runner.name, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"runner {runner.name} needs {' and '.join(missing)}: install with `pip install 'kvpolicy[{runner.name}]'`"
        )
    address = _address_of(runner)
    if address is not None:
        host, port = _host_and_port(runner, address)
        try:
            with socket.create_connection((host, port), timeout=_ANSWER_TIMEOUT_S) as connection:
                # Dask's client waits for ever for one who listens and is silent; its scheduler speaks first.
                if runner.name == "dask" and not address.startswith("tls://") and not connection.recv(1):
                    raise ConnectionError("it hung up")
            if runner.name == "ray":
                _require_ray(host, port)
        except OSError as error:
            raise _nobody(runner, address, error.strerror or str(error)) from error


@contextmanager
def engaged(runner: Runner) -> Iterator[None]:
    """Let the flows that the block runs use a runner; one that is engaged already, by the flow around, is kept.

    Raises:
        InputError: As `check_runner`.
    """
    if runner.name == "local" or _ENGAGED.get() is not None:
        yield
        return
    check_runner(runner)
    engagement = _Engagement(runner=runner)
    token = _ENGAGED.set(engagement)
    try:
        with engagement.stack:
            yield
    finally:
        _ENGAGED.reset(token)


def current_engine() -> Engine | None:
    """The engine of the runner that is engaged, started if it is not yet; None if parts run in this process.

    Raises:
        InputError: If it does not start.
    """
    engagement = _ENGAGED.get()
    if engagement is None:
        return None
    if engagement.engine is None:
        engagement.engine = _start(engagement.runner, engagement.stack)
    return engagement.engine


def restart_engine() -> None:
    """End the engine that is engaged; the next part starts another one."""
    engagement = _ENGAGED.get()
    if engagement is not None:
        engagement.engine = None
        engagement.stack.close()


def _start(runner: Runner, stack: ExitStack) -> Engine:
    import torch

    threads = torch.get_num_threads()
    stack.enter_context(
        environment_with(OMP_NUM_THREADS=str(threads), TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    )
    start = {"processes": _start_processes, "ray": _start_ray, "dask": _start_dask}[runner.name]
    return start(runner, stack, threads)


def _start_processes(runner: Runner, stack: ExitStack, threads: int) -> Engine:
    from concurrent.futures.process import BrokenProcessPool

    from prefect.task_runners import ProcessPoolTaskRunner

    num_workers = _workers_here(runner, threads)
    pool = stack.enter_context(ProcessPoolTaskRunner(max_workers=num_workers, initializer=_leave_ends_to_parent))
    # A worker that is killed while it writes to Prefect's queue of messages keeps its lock for ever, and this process,
    # which waits for what it has put there itself, would not end. Prefect 3.9 has no public way to say so.
    stack.callback(pool._subprocess_message_queue.cancel_join_thread)
    return Engine(
        name=runner.name,
        task_runner=pool,
        num_slots=num_workers,
        lost_worker=(BrokenProcessPool,),
        heals=False,
    )


def _start_ray(runner: Runner, stack: ExitStack, threads: int) -> Engine:
    address = _address_of(runner)
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
        "runtime_env": {"env_vars": _passed_on()},
    }
    variables = {"RAY_USAGE_STATS_ENABLED": "0"}
    if address is None:
        options |= {"num_cpus": _workers_here(runner, threads) * threads, "include_dashboard": False}
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # so that, on any system, it listens on loopback only
    stack.enter_context(environment_with(**variables))
    import ray
    from prefect_ray import RayTaskRunner
    from prefect_ray.context import remote_options

    with _refusing(runner, address), warnings.catch_warnings():
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


def _require_ray(host: str, port: int) -> None:
    """Refuse what does not speak as Ray does, in seconds: Ray itself would try for minutes.

    Raises:
        TimeoutError: If nothing there does.
    """
    import grpc
    import ray

    if host in (_LOOPBACK, "localhost"):
        host = ray.util.get_node_ip_address()  # where Ray will look for it
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_ANSWER_TIMEOUT_S)
        except grpc.FutureTimeoutError as error:
            raise TimeoutError(f"nothing speaks at {host}:{port} within {_ANSWER_TIMEOUT_S:.0f} s") from error


def _start_dask(runner: Runner, stack: ExitStack, threads: int) -> Engine:
    import distributed
    from prefect_dask import DaskTaskRunner

    address = _address_of(runner)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    if address is None:
        started_here = {
            "n_workers": _workers_here(runner, threads),
            "threads_per_worker": 1,
            "host": _LOOPBACK,
            "dashboard_address": None,
            "silence_logs": logging.CRITICAL,
            "env": _passed_on(),
        }
        made = DaskTaskRunner(cluster_kwargs=started_here)
    else:
        made = DaskTaskRunner(address=address, client_kwargs={"timeout": _ANSWER_TIMEOUT_S})
    with _refusing(runner, address):
        task_runner = stack.enter_context(made)
        threads_of_workers = task_runner.client.nthreads().values()
    if max(threads_of_workers, default=1) > 1:
        raise InputError(
            f"workers of the Dask cluster at {address} run several parts in one process, and a model serves one at a "
            "time: start them with --nthreads 1"
        )
    return Engine(
        name=runner.name,
        task_runner=task_runner,
        num_slots=max(1, len(threads_of_workers)),
        lost_worker=(distributed.KilledWorker, distributed.CancelledError),
        heals=True,
    )


def _workers_here(runner: Runner, threads: int) -> int:
    return runner.num_workers or max(2, len(os.sched_getaffinity(0)) // threads)


def _address_of(runner: Runner) -> str | None:
    return runner.address or os.environ.get(_ADDRESS_VARIABLE.get(runner.name, "")) or None


def _host_and_port(runner: Runner, address: str) -> tuple[str, int]:
    """Where a cluster listens, of `host:port` or a URL.

    Raises:
        InputError: If it is neither.
    """
    try:
        parts = urlsplit(address if "://" in address else f"tcp://{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise InputError(f"address of the runner {runner.name} is {address!r}, expected host:port")
    return host, port


@contextmanager
def _refusing(runner: Runner, address: str | None) -> Iterator[None]:
    """Say in one line that an engine does not start; libraries raise whatever they like."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if address is not None:
            raise _nobody(runner, address, reason) from error
        raise InputError(f"runner {runner.name} does not start here ({reason}): use --runner processes") from error


def _nobody(runner: Runner, address: str, reason: str) -> InputError:
    return InputError(
        f"no {runner.name.capitalize()} cluster answers at {address} ({reason}): start it, or leave the address and "
        f"{_ADDRESS_VARIABLE[runner.name]} out to run on this machine"
    )


def _passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}


def _leave_ends_to_parent() -> None:
    """Let a worker end with the process that started it, however that ends: nobody else would end it."""
    # Ctrl-C reaches workers as well. An exception would end the thread that Prefect (3.9) hears of parts in, and this
    # worker would wait for ever for the next one; by the signal it ends at once, and the parent says what happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
