"""Register this project with a Prefect server: work pool, queue, deployments, and when a run counts as crashed."""

import os
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from flows.services.prefect_server import HEARTBEAT_S
from flows.services.processes import Service, last_error
from flows.services.recovery import prefect_client
from storage.errors import StorageError

CHECKOUT = Path(__file__).resolve().parents[2]
POOL = "kvpolicy"
QUEUE = "gpu"
CRASHES = "kvpolicy: flow runs whose heartbeat ends have crashed"
_MISSED_HEARTBEATS = 3
_DEPLOY_TIMEOUT_S = 180
_WORKER_TIMEOUT_S = 90.0
_POLL_S = 0.2


def prepare_server(*, runs_at_once: int) -> None:
    """Create or correct the work pool, its queue and the automation, and register the deployments of prefect.yaml.

    This is idempotent.

    Args:
        runs_at_once: How many flow runs of the queue may run at once.

    Raises:
        StorageError: If the server refuses, or the deployments cannot be registered.
    """
    with prefect_client() as client:
        _make_pool(client)
        _limit_queue(client, runs_at_once)
    _deploy()
    with prefect_client() as client:
        _watch_heartbeats(client)


def deployments(client: Any) -> list[str]:
    """The deployments of the pool, as `prefect deployment run` takes them."""
    registered = client.read_deployments()
    flows = {flow.id: flow.name for flow in client.read_flows()} if registered else {}
    return sorted(
        f"{flows.get(entry.flow_id, '')}/{entry.name}" for entry in registered if entry.work_pool_name == POOL
    )


def wait_for_worker(name: str, worker: Service) -> None:
    """Wait until a worker has reported to the server since its start.

    Raises:
        StorageError: If the worker ends before, or takes too long.
    """
    deadline, started_at = time.monotonic() + _WORKER_TIMEOUT_S, datetime.fromisoformat(worker.started_at)
    with prefect_client() as client:
        while worker.runs and time.monotonic() < deadline:
            for reported in client.read_workers_for_work_pool(POOL):
                seen_at = reported.last_heartbeat_time
                if reported.name == name and seen_at is not None and seen_at >= started_at:
                    return
            time.sleep(_POLL_S)
    state = "does not report to the server" if worker.runs else "died"
    raise StorageError(f"the worker {state} ({last_error(Path(worker.log))}), {worker.log} says more")


def _make_pool(client: Any) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type=ProcessWorker.type, base_job_template=template))
        return
    if pool.type != ProcessWorker.type:
        raise StorageError(
            f"the work pool {POOL} is of type {pool.type}, expected {ProcessWorker.type}: `kvp up` is for one machine; "
            "start a worker of that type (docs/deployments.md), or delete the pool"
        )


def _limit_queue(client: Any, runs_at_once: int) -> None:
    from prefect.client.schemas.filters import WorkQueueFilter

    chosen = WorkQueueFilter.model_validate({"name": {"any_": [QUEUE]}})
    queues = client.read_work_queues(work_pool_name=POOL, work_queue_filter=chosen)
    if not queues:
        client.create_work_queue(QUEUE, work_pool_name=POOL, concurrency_limit=runs_at_once)
    elif queues[0].concurrency_limit != runs_at_once:
        client.update_work_queue(queues[0].id, concurrency_limit=runs_at_once)


def _deploy() -> None:
    if not (CHECKOUT / "prefect.yaml").is_file():
        raise StorageError(f"no prefect.yaml in {CHECKOUT}: `kvp up` needs a checkout, `pip install -e` one")
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    try:
        done = subprocess.run(
            command,
            cwd=CHECKOUT,
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEPLOY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StorageError(f"prefect deploy took more than {_DEPLOY_TIMEOUT_S} s: run `kvp up` again") from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["it said nothing"]
        raise StorageError(f"prefect deploy ended with {done.returncode} ({lines[-1].strip()}): check prefect.yaml")


def _watch_heartbeats(client: Any) -> None:
    """Let the server mark a flow run as crashed that sent heartbeats and then neither one nor an end.

    Prefect's recipe for runs whose machine died
    (https://docs.prefect.io/v3/advanced/detect-zombie-flows). Flow runs without heartbeats are left alone.
    """
    from prefect.automations import AutomationCore, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState

    beat = "prefect.flow-run.heartbeat"
    ends = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed")}
    wanted = AutomationCore(
        name=CRASHES,
        description="Made by `kvp up`, which mends it if it is changed.",
        trigger=EventTrigger(
            after={beat},
            expect={beat, *ends},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=_MISSED_HEARTBEATS * int(HEARTBEAT_S)),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                message=f"No heartbeat for {_MISSED_HEARTBEATS * int(HEARTBEAT_S)} s: its process or machine is dead.",
            )
        ],
    )
    automations = client.read_automations_by_name(CRASHES)
    if not automations:
        client.create_automation(wanted)
        return
    kept, *others = automations
    if kept.model_dump(exclude={"id"}) != wanted.model_dump():
        client.update_automation(kept.id, wanted)
    for other in others:
        client.delete_automation(other.id)
