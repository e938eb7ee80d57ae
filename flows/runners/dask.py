"""Dask: a cluster at an address, or one of this command's own on this machine."""

import logging
from contextlib import ExitStack

from flows.runners.clusters import ANSWER_TIMEOUT_S, LOOPBACK, address_of, refusing
from flows.runners.engine import Engine, passed_on, workers_here
from flows.runtime.run_options import Runner
from kvpolicy.errors import InputError


def start_dask(runner: Runner, stack: ExitStack, threads: int) -> Engine:
    """Join the cluster, or start one; the stack leaves it or ends it.

    Raises:
        InputError: If it does not start, or its workers run several parts in one process.
    """
    import distributed
    from prefect_dask import DaskTaskRunner

    address = address_of(runner)
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    if address is None:
        started_here = {
            "n_workers": workers_here(runner, threads),
            "threads_per_worker": 1,
            "host": LOOPBACK,
            "dashboard_address": None,
            "silence_logs": logging.CRITICAL,
            "env": passed_on(),
        }
        made = DaskTaskRunner(cluster_kwargs=started_here)
    else:
        made = DaskTaskRunner(address=address, client_kwargs={"timeout": ANSWER_TIMEOUT_S})
    with refusing(runner, address):
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
