"""An engine: one of Prefect's task runners, started, and what `flows.runners.fan_out` has to know of it."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flows.runtime.run_options import Runner

if TYPE_CHECKING:
    from prefect.task_runners import TaskRunner

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


def workers_here(runner: Runner, threads: int) -> int:
    """Workers to start on this machine: as many as were asked for, else as its cores serve, but at least two."""
    return runner.num_workers or max(2, len(os.sched_getaffinity(0)) // threads)


def passed_on() -> dict[str, str]:
    """Variables of this process that workers elsewhere need too."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
