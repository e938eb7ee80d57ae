"""Running the independent parts of a stage: one after the other in this process, or at once on what is engaged.

References travel, tensors do not. Which machines and processes there are is the business of `flows.runners`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from prefect.futures import PrefectFuture
from prefect.utilities.callables import get_call_parameters

from flows.display.run_progress import showing_stage
from flows.runners.engagement import current_engine, restart_engine
from flows.runners.engine import Engine
from flows.runners.gpu_share import gpu_share
from kvpolicy.errors import InputError, first_line
from tasks.framework.progress import LOGGER
from tasks.framework.stage import code_of
from tasks.framework.worker import sending

_MOST_LOSSES = 3
_SENT_PER_SLOT = 2  # the server need not know of thousands that wait, and no worker waits for the next


def run_parts(
    what: str, parts: Sequence["partial[Any]"], *, gpu_bytes: Callable[[], int | None] | None = None
) -> list[Any]:
    """Run the parts of a stage and return what they return, in their order.

    After a failure no further part is begun, but those that run are waited for: what they finish is not done again.

    Args:
        what: The work, for the progress that is shown.
        parts: Calls of tasks.
        gpu_bytes: Memory that each takes of a GPU, asked only where there are any; by default it has one for itself.

    Raises:
        InputError: If workers are lost again and again, or run other code than this process.
        Exception: What the first part that failed has raised.
    """
    engine = current_engine() if parts else None
    if engine is not None:
        needed = gpu_bytes() if gpu_bytes is not None and engine.gpu_bytes else None
        return _Sending(engine, parts, needed).run(what)
    results: list[Any] = []
    with showing_stage(what, len(parts)) as change:
        for part in parts:
            change(running=1)
            try:
                results.append(part())
            except Exception:
                change(running=0, failed=1)
                raise
            change(running=0, done=len(results))
    return results


class _Sending:
    """Parts on their way through an engine: waiting, sent, or done."""

    def __init__(self, engine: Engine, parts: Sequence["partial[Any]"], gpu_bytes: int | None) -> None:
        self._engine, self._parts, self._gpu_bytes = engine, parts, gpu_bytes
        self._waiting = deque(range(len(parts)))
        self._sent: dict[int, PrefectFuture[Any]] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Exception] = {}
        self._losses = 0

    def run(self, what: str) -> list[Any]:
        """Send all parts and gather what they return."""
        with showing_stage(what, len(self._parts)) as change:
            while self._sent or (self._waiting and not self._failures):
                lost = self._gather(change)
                if lost is not None:
                    self._renew(lost)
        if self._failures:
            raise self._failures[min(self._failures)]
        return [self._results[index] for index in range(len(self._parts))]

    def _gather(self, change: Callable[..., None]) -> Exception | None:
        """Keep the engine busy until there is nothing left to send or wait for, or until it has lost a worker."""
        lost: Exception | None = None
        while self._sent or (self._waiting and not self._failures and lost is None):
            while (
                self._waiting
                and not self._failures
                and lost is None
                and len(self._sent) < _SENT_PER_SLOT * self._engine.num_slots
            ):
                self._send(self._waiting.popleft())
            index = self._ended.get()
            try:
                self._results[index] = self._sent.pop(index).result()
            except ImportError as error:  # also as Ray tells it
                self._failures[index] = InputError(
                    f"a worker of {self._engine.name} cannot import what it needs ({first_line(error)}): install the "
                    "same release and packages on every machine"
                )
            except self._engine.lost_worker as error:
                lost = error
                self._waiting.appendleft(index)
            except Exception as error:
                self._failures[index] = error
            else:
                self._losses = 0
            running = min(len(self._sent), self._engine.num_slots)
            change(done=len(self._results), running=running, failed=len(self._failures))
        return lost

    def _send(self, index: int) -> None:
        part = self._parts[index]
        parameters = get_call_parameters(part.func.fn, part.args, part.keywords)
        share = gpu_share(self._gpu_bytes, self._engine.gpu_bytes) if self._engine.gpu_bytes else 0.0
        with sending(code_of(part.func.__module__), torch.get_num_threads()), self._engine.asking(share):
            future = self._engine.task_runner.submit(part.func, parameters)
        self._sent[index] = future
        future.add_done_callback(lambda _: self._ended.put(index))

    def _renew(self, lost: Exception) -> None:
        """Start the engine anew after it has lost a worker.

        Raises:
            InputError: If that does not help, or the engine has tried itself.
        """
        self._losses += 1
        reason = f"{type(lost).__name__}: {first_line(lost)}"
        if self._engine.heals or self._losses > _MOST_LOSSES:
            raise InputError(
                f"runner {self._engine.name} lost workers again and again ({reason}): see whether they run out of "
                "memory, then run the same command again, which goes on where this one ended"
            ) from lost
        LOGGER.warning("a worker died (%s); %d parts are left and go on", reason, len(self._waiting))
        restart_engine()
        engine = current_engine()
        assert engine is not None, "an engine that was engaged still is"
        self._engine = engine
