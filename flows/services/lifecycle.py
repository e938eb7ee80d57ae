"""The services of a home on one machine: Prefect's server, a worker for its deployments, and MLflow's server.

All three listen on loopback only, and live until `kvp down`.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flows.display.run_progress import recorded_progress
from flows.runtime.process import environment_with
from flows.services.prefect_server import HEARTBEAT_S, SERVER_LOCK, own_server, require_database
from flows.services.processes import MLFLOW, SERVER, WORKER, Service, recorded, start, stop, wait_for, worker_name
from flows.services.recovery import (
    UnfinishedRun,
    described,
    orphans_among,
    prefect_client,
    recover,
    unfinished_flow_runs,
)
from flows.services.work_pool import POOL, deployments, prepare_server, wait_for_worker
from storage.errors import StorageError
from storage.home import Home, exclusive

_HOST = "127.0.0.1"
_PORT_OPTIONS = {SERVER: "--port", MLFLOW: "--mlflow-port"}
_LOCK = "services"
_ANSWER_TIMEOUT_S = 20.0
# The command's own quiet, which must not become that of the services' logs.
_OF_THE_COMMAND = (
    "PREFECT_API_URL",
    "PREFECT_INTERNAL_LOGGING_LEVEL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL",
    "PREFECT_LOGGING_LEVEL",
)


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """How a service is.

    Attributes:
        name: `server`, `mlflow` or `worker`.
        state: `running`; `dead` if it ended by itself; `stopped`.
        url: Where people reach it, or for the worker the server that it serves; empty if it is stopped.
        pid: Its first process; None unless it runs.
        since: When it was started, in UTC; empty if it is stopped.
        log: What it says; empty if it is stopped.
        started: Whether this command started it.
    """

    name: str
    state: str
    url: str = ""
    pid: int | None = None
    since: str = ""
    log: str = ""
    started: bool = False


@dataclass(frozen=True, kw_only=True)
class Status:
    """What runs for a home.

    Attributes:
        home: The home.
        services: The services.
        api_url: What `PREFECT_API_URL` is to be for Prefect's own commands; empty if no server answers.
        deployments: What `prefect deployment run` takes.
        flow_runs: Flow runs that run.
        orphans: Those that Prefect takes for running although their process is dead.
        recovered: Those that were, and have now been noted as crashed.
        progress: Flow run id to how far it is, of those flow runs that say so.
    """

    home: str
    services: list[ServiceState]
    api_url: str = ""
    deployments: list[str] = field(default_factory=list)
    flow_runs: list[UnfinishedRun] = field(default_factory=list)
    orphans: list[UnfinishedRun] = field(default_factory=list)
    recovered: list[UnfinishedRun] = field(default_factory=list)
    progress: dict[str, str] = field(default_factory=dict)


def up(home: Home, *, port: int | None, mlflow_port: int | None, runs_at_once: int) -> Status:
    """Start what does not run, and wait until all of it answers. If that fails, what was started is ended again.

    Args:
        home: The home.
        port: Of Prefect's server; None for the one it had when it died, or a free one.
        mlflow_port: Of MLflow's server; likewise.
        runs_at_once: How many flow runs of the deployments may run at once.

    Raises:
        StorageError: If one cannot be started or dies, or a port is in use.
    """
    from storage.mlflow.tracking import Tracking

    with exclusive(home, _LOCK), _ended_on_failure(home) as started:
        server_url, mlflow_url = _choose_url(home, SERVER, port), _choose_url(home, MLFLOW, mlflow_port)
        require_database(home)
        Tracking(home).prepare()  # two servers that make one database at once break each other
        with exclusive(home, SERVER_LOCK):
            server = _ensure(home, SERVER, server_url, started)
            mlflow = _ensure(home, MLFLOW, mlflow_url, started)
            wait_for(server, f"{server.url}/api/health")
        wait_for(mlflow, f"{mlflow.url}/health")
        with environment_with(PREFECT_API_URL=f"{server.url}/api"):
            _end_leftovers(home, WORKER, server_url)
            recovered = recover(home)
            prepare_server(runs_at_once=runs_at_once)
            wait_for_worker(str(worker_name(home, create=True)), _ensure(home, WORKER, server_url, started))
        return status(home, started=[service.name for service in started], recovered=recovered)


def down(home: Home) -> tuple[list[str], list[UnfinishedRun]]:
    """End the services, and say which ran and which flow runs that ended.

    Raises:
        StorageError: If a process cannot be ended.
    """
    with exclusive(home, _LOCK):
        ended: list[str] = []
        recovered: list[UnfinishedRun] = []
        for name in (WORKER, MLFLOW, SERVER):
            service = recorded(home, name)
            if service is None:
                continue
            if name == SERVER and service.runs:
                recovered = _recover_before_the_end(home, service)
            ended += [name] if service.runs else []
            stop(home, service)
    return ended, recovered


def status(home: Home, *, started: list[str] | None = None, recovered: list[UnfinishedRun] | None = None) -> Status:
    """What runs for a home now.

    Raises:
        StorageError: If its server runs and refuses.
    """
    services = [_state(home, name, name in (started or [])) for name in (SERVER, MLFLOW, WORKER)]
    server = recorded(home, SERVER)
    if server is None or not server.runs:
        return Status(home=str(home.path), services=services, recovered=recovered or [])
    api_url = f"{server.url}/api"
    wait_for(server, f"{api_url}/health", timeout_s=_ANSWER_TIMEOUT_S)
    with environment_with(PREFECT_API_URL=api_url), prefect_client() as client:
        unfinished = unfinished_flow_runs(client)
        orphans = orphans_among(home, client, unfinished)
        dead = {run.id for run in orphans}
        return Status(
            home=str(home.path),
            services=services,
            api_url=api_url,
            deployments=deployments(client),
            flow_runs=[described(run) for run in unfinished if run.id not in dead],
            orphans=[described(run) for run in orphans],
            recovered=recovered or [],
            progress=recorded_progress(client, [run.id for run in unfinished]),
        )


def recover_orphans(home: Home) -> list[UnfinishedRun]:
    """Note that the flow runs whose process is dead crashed; with a server for the while if none runs.

    Raises:
        StorageError: If the server refuses.
    """
    with own_server(home) as wait_for_server:
        return wait_for_server()


def _ensure(home: Home, name: str, url: str, started: list[Service]) -> Service:
    """The service at a URL, started if it does not run."""
    _end_leftovers(home, name, url)
    known = recorded(home, name)
    if known is not None:
        return known
    command, env = _invocation(home, name, url)
    service = start(home, name, command, url=url, env=env)
    started.append(service)
    return service


def _end_leftovers(home: Home, name: str, url: str) -> None:
    """End what a dead service has left behind, such as flow runs of a worker, and a worker of a server that is gone."""
    known = recorded(home, name)
    if known is not None and not (known.runs and known.url == url):
        stop(home, known)


def _invocation(home: Home, name: str, url: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a service."""
    env = {key: value for key, value in os.environ.items() if key not in _OF_THE_COMMAND}
    python, port = [sys.executable, "-m"], url.rpartition(":")[2]
    if name == MLFLOW:
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        store = ["--backend-store-uri", home.mlflow_tracking_uri]
        store += ["--default-artifact-root", home.mlflow_artifacts.as_uri()]
        address = ["--host", _HOST, "--port", port, "--workers", "1"]
        return [*python, "mlflow", "server", *store, *address], {**env, **quiet}
    env["PREFECT_API_URL"] = f"{url}/api"
    if name == SERVER:
        env["PREFECT_SERVER_LOGGING_LEVEL"] = "WARNING"
        return [*python, "prefect", "server", "start", "--host", _HOST, "--port", port], env
    env |= {"KVP_HOME": str(home.path), "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": HEARTBEAT_S}
    own_name = str(worker_name(home))
    return [*python, "prefect", "worker", "start", "--pool", POOL, "--name", own_name, "--type", "process"], env


def _choose_url(home: Home, name: str, port: int | None) -> str:
    """Where a service runs, or is to run: where it was before, if it may."""
    known = recorded(home, name)
    if known is not None and known.runs:
        if port not in (None, _port_of(known)):
            raise StorageError(f"the {name} runs already, at {known.url}: `kvp down` first, or leave the port out")
        return known.url
    if port is not None and not _is_free(port):
        raise StorageError(f"port {port} is in use: give the {name} another one ({_PORT_OPTIONS[name]}), or none")
    if port is None and known is not None and _is_free(_port_of(known)):
        port = _port_of(known)
    if port is None:
        with socket.create_server((_HOST, 0)) as listener:
            port = int(listener.getsockname()[1])
    return f"http://{_HOST}:{port}"


def _is_free(port: int) -> bool:
    try:
        with socket.create_server((_HOST, port)):
            return True
    except OSError:
        return False


def _port_of(service: Service) -> int:
    return int(service.url.rpartition(":")[2])


@contextmanager
def _ended_on_failure(home: Home) -> Iterator[list[Service]]:
    started: list[Service] = []
    try:
        yield started
    except BaseException:
        for service in reversed(started):
            stop(home, service)
        raise


def _recover_before_the_end(home: Home, server: Service) -> list[UnfinishedRun]:
    """Note what crashed with the worker while the server still answers; it must end in any case."""
    try:
        with environment_with(PREFECT_API_URL=f"{server.url}/api"):
            return recover(home)
    except StorageError:
        return []  # the next `kvp up` finds them


def _state(home: Home, name: str, started: bool) -> ServiceState:
    service = recorded(home, name)
    if service is None:
        return ServiceState(name=name, state="stopped")
    runs = service.runs
    return ServiceState(
        name=name,
        state="running" if runs else "dead",
        url=service.url,
        pid=service.pid if runs else None,
        since=service.started_at,
        log=service.log,
        started=started,
    )
