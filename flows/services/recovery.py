"""Runs that Prefect takes for running although their process is dead: finding them, and saying that they crashed.

Prefect hears of a death only from a worker that outlives it, or by the heartbeats that `flows.services.work_pool`
watches. Runs that died with their worker or their server are found here, by what is left on this machine: a command
holds a lock for as long as it lives and its flow runs carry the lock's name as a tag; a worker's flow run has its id in
its process's environment. Flow runs of anybody else are left alone. A task run of a flow run that has ended has been
lost with its worker: the flow run went on with another one.
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from flows.services.processes import WORKER, environment_of, is_running, worker_name
from kvpolicy.errors import first_line
from storage.errors import StorageError
from storage.home import Home, exclusive, is_held

if TYPE_CHECKING:
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import FlowRun

MARK = "kvp.process:"
CRASH_MESSAGE = "Its process is dead: run the same command or deployment again to go on."
LOST_MESSAGE = "Its worker is dead, and its flow run has ended without it."
_COMMAND = "command-"
_WORKER_LABEL = "prefect.worker.name"
_PAGE = 200  # Prefect's limit of rows an answer
# The server notes the ends of task runs in turns of 5 s, so later than that of their flow run.
_NEWS_TAKES = timedelta(seconds=15)


@dataclass(frozen=True, kw_only=True)
class UnfinishedRun:
    """A flow run that was taken up and has not ended, as `kvp status` shows it.

    Attributes:
        flow_run_id: Its id.
        name: Its name.
        state: Its state in Prefect.
        started_at: When it began, in UTC; empty if it did not.
    """

    flow_run_id: str
    name: str
    state: str
    started_at: str


@contextmanager
def marked_process(home: Home) -> Iterator[str]:
    """Hold a lock while a command lives; gives the tag that its flow runs are to carry."""
    name = f"{_COMMAND}{uuid.uuid4().hex}"
    with exclusive(home, name):
        yield MARK + name
        # Not if it is interrupted: Prefect may not have heard of its end then, and the free lock will say so.
        _lock(home, name).unlink(missing_ok=True)


def unfinished_flow_runs(client: Any) -> "list[FlowRun]":
    """All flow runs that have been taken up and have not ended, the oldest first."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    chosen = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}})
    unfinished: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=chosen, sort=FlowRunSort.START_TIME_ASC, limit=_PAGE, offset=len(unfinished)
        )
        unfinished += page
        if len(page) < _PAGE:
            return unfinished


def orphans_among(home: Home, client: Any, runs: "Sequence[FlowRun]") -> "list[FlowRun]":
    """Those of the unfinished flow runs whose process is dead.

    Args:
        home: The home.
        client: Prefect's client.
        runs: Flow runs, listed before this is asked: their processes are looked up now.
    """
    worker, worker_runs = worker_name(home), is_running(home, WORKER)
    processes = {environment_of(pid).get("PREFECT__FLOW_RUN_ID") for pid in psutil.pids()}
    verdicts: dict[str, bool] = {}

    def is_dead(run: "FlowRun") -> bool:
        key = str(run.id)
        if key not in verdicts:
            verdicts[key] = find_verdict(run)
        return verdicts[key]

    def find_verdict(run: "FlowRun") -> bool:
        if run.state is not None and run.state.is_final():
            return str(run.state.type.value) == "CRASHED"  # of a parent
        marks = [tag.removeprefix(MARK) for tag in run.tags if tag.startswith(MARK)]
        if marks:
            return any(_lock(home, mark).exists() and not is_held(home, mark) for mark in marks)
        if worker is not None and (run.labels or {}).get(_WORKER_LABEL) == worker:
            about_to_start = run.state is not None and run.state.is_pending() and worker_runs
            return str(run.id) not in processes and not about_to_start
        if run.parent_task_run_id is not None:
            parent = client.read_task_run(run.parent_task_run_id).flow_run_id
            return parent is not None and is_dead(client.read_flow_run(parent))
        return False

    return [run for run in runs if is_dead(run)]


def _crash(client: Any, runs: "Sequence[FlowRun]") -> list[UnfinishedRun]:
    """Note that flow runs and the task runs in them crashed; one that has ended meanwhile is left alone."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Crashed

    crashed = []
    for run in runs:
        state = client.read_flow_run(run.id).state
        if state is not None and state.is_final():
            continue
        client.set_flow_run_state(run.id, Crashed(message=CRASH_MESSAGE), force=True)
        _crash_tasks(client, FlowRunFilter.model_validate({"id": {"any_": [run.id]}}), CRASH_MESSAGE)
        crashed.append(described(run))
    return crashed


def _crash_lost_tasks(client: Any) -> None:
    """Note that task runs crashed that are open although their flow run has ended."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import TERMINAL_STATES

    before = {"before_": datetime.now(UTC) - _NEWS_TAKES}
    ended = FlowRunFilter.model_validate({"state": {"type": {"any_": sorted(TERMINAL_STATES)}}, "end_time": before})
    _crash_tasks(client, ended, LOST_MESSAGE)


def _crash_tasks(client: Any, of: "FlowRunFilter", message: str) -> None:
    """Note that the open task runs of flow runs crashed."""
    from prefect.client.schemas.filters import TaskRunFilter
    from prefect.states import Crashed

    is_open = TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "PENDING"]}}})
    while tasks := client.read_task_runs(flow_run_filter=of, task_run_filter=is_open, limit=_PAGE):
        for task in tasks:
            client.set_task_run_state(task.id, Crashed(message=message), force=True)


def described(run: "FlowRun") -> UnfinishedRun:
    """Describe a flow run for `kvp status`."""
    return UnfinishedRun(
        flow_run_id=str(run.id),
        name=run.name,
        state=run.state_name or "",
        started_at="" if run.start_time is None else run.start_time.isoformat(timespec="seconds"),
    )


def recover(home: Home) -> list[UnfinishedRun]:
    """Note that flow runs whose process is dead crashed, and task runs that were lost. Call it when the server answers.

    Raises:
        StorageError: If the server refuses.
    """
    with prefect_client() as client:
        crashed = _crash(client, orphans_among(home, client, unfinished_flow_runs(client)))
        _crash_lost_tasks(client)
    for lock in (home.path / "locks").glob(f"{_COMMAND}*"):
        if not is_held(home, lock.name):
            lock.unlink(missing_ok=True)  # of a command that was killed; nothing asks for it any more
    return crashed


@contextmanager
def prefect_client() -> Iterator[Any]:
    """Prefect's client for the server that the environment names, with errors of one line.

    Raises:
        StorageError: If the server refuses or cannot be reached.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException

    try:
        with get_client(sync_client=True) as client:
            yield client
    except (httpx.HTTPError, PrefectException) as error:
        raise StorageError(
            f"the request to the Prefect server failed ({first_line(error)}): look at its log, and whether its "
            "database can be written"
        ) from error


def _lock(home: Home, name: str) -> Path:
    return home.path / "locks" / name
