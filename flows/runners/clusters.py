"""Clusters of Ray and Dask: where they are, whether one answers there, and the one line that says that it does not."""

import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from flows.runtime.run_options import Runner
from kvpolicy.errors import InputError

LOOPBACK = "127.0.0.1"
ANSWER_TIMEOUT_S = 5.0
_NEEDS = {"ray": ("ray", "prefect_ray"), "dask": ("distributed", "prefect_dask")}
_ADDRESS_VARIABLE = {"ray": "RAY_ADDRESS", "dask": "DASK_SCHEDULER_ADDRESS"}


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
    address = address_of(runner)
    if address is not None:
        host, port = _host_and_port(runner, address)
        try:
            with socket.create_connection((host, port), timeout=ANSWER_TIMEOUT_S) as connection:
                # Dask's client waits for ever for one who listens and is silent; its scheduler speaks first.
                if runner.name == "dask" and not address.startswith("tls://") and not connection.recv(1):
                    raise ConnectionError("it hung up")
            if runner.name == "ray":
                _require_ray(host, port)
        except OSError as error:
            raise _nobody(runner, address, error.strerror or str(error)) from error


def address_of(runner: Runner) -> str | None:
    """Where the cluster is, by the runner or the environment; None for one of this command's own on this machine."""
    return runner.address or os.environ.get(_ADDRESS_VARIABLE.get(runner.name, "")) or None


@contextmanager
def refusing(runner: Runner, address: str | None) -> Iterator[None]:
    """Say in one line that an engine does not start; libraries raise whatever they like."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        if address is not None:
            raise _nobody(runner, address, reason) from error
        raise InputError(f"runner {runner.name} does not start here ({reason}): use --runner processes") from error


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


def _require_ray(host: str, port: int) -> None:
    """Refuse what does not speak as Ray does, in seconds: Ray itself would try for minutes.

    Raises:
        TimeoutError: If nothing there does.
    """
    import grpc
    import ray

    if host in (LOOPBACK, "localhost"):
        host = ray.util.get_node_ip_address()  # where Ray will look for it
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_TIMEOUT_S)
        except grpc.FutureTimeoutError as error:
            raise TimeoutError(f"nothing speaks at {host}:{port} within {ANSWER_TIMEOUT_S:.0f} s") from error


def _nobody(runner: Runner, address: str, reason: str) -> InputError:
    return InputError(
        f"no {runner.name.capitalize()} cluster answers at {address} ({reason}): start it, or leave the address and "
        f"{_ADDRESS_VARIABLE[runner.name]} out to run on this machine"
    )
