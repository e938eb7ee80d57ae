"""A pool of processes on this machine."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from flows.runners.engine import Engine, workers_here
from flows.runtime.run_options import Runner


def start_processes(runner: Runner, stack: ExitStack, threads: int) -> Engine:
    """Start the pool, which ends with the stack."""
    from concurrent.futures.process import BrokenProcessPool

    from prefect.task_runners import ProcessPoolTaskRunner

    num_workers = workers_here(runner, threads)
    pool = stack.enter_context(ProcessPoolTaskRunner(max_workers=num_workers, initializer=_leave_ends_to_parent))
    # A worker that is killed while it writes to Prefect's queue of messages keeps its lock for ever, and this process,
    # which waits for what it has put there itself, would not end. Prefect 3.9 has no public way to say so.
    stack.callback(pool._subprocess_message_queue.cancel_join_thread)
    executor: Any = pool._executor
    executor.submit = partial(executor.submit, _run_without_exit)
    return Engine(
        name=runner.name,
        task_runner=pool,
        num_slots=num_workers,
        lost_worker=(BrokenProcessPool,),
        heals=False,
    )


def _run_without_exit(part: Callable[[], bytes]) -> bytes:
    """Run a part in a worker, and raise an error where the part would exit.

    Prefect (3.9) exits a worker's task when the server is lost. The exit travels to the flow's process as the result of
    the part, ends the thread that receives all results there, and prints nothing: the flow would wait for ever.
    """
    try:
        return part()
    except Exception:
        raise
    except BaseException as end:
        reason = _reason_of(end)
    raise reason  # behind the handler: in it, the exit would become the context of what led to it


def _reason_of(end: BaseException) -> Exception:
    """The error that an exit hides: a lost connection, whatever Prefect made of it, or else the last one before it."""
    import httpx

    errors, error = [], end.__context__
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or error.__context__
    for kind in (httpx.TransportError, Exception):
        for error in errors:
            if isinstance(error, kind):
                return error
    return RuntimeError(f"a part ended its worker ({type(end).__name__}: {end})")


def _leave_ends_to_parent() -> None:
    """Let a worker end with the process that started it, however that ends: nobody else would end it."""
    # Ctrl-C reaches workers as well. An exception would end the thread that Prefect (3.9) hears of parts in, and this
    # worker would wait for ever for the next one; by the signal it ends at once, and the parent says what happened.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
