"""Which runner flows use: engaged around them, checked before anything is made, started when first needed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from flows.runners.clusters import check_runner
from flows.runners.dask import start_dask
from flows.runners.engine import Engine
from flows.runners.process_pool import start_processes
from flows.runners.ray import start_ray
from flows.runtime.process import environment_with
from flows.runtime.run_options import Runner


@dataclass(kw_only=True)
class _Engagement:
    """A runner that flows may use; its engine starts with the first part, as often there is none to run."""

    runner: Runner
    stack: ExitStack = field(default_factory=ExitStack)
    engine: Engine | None = None


_ENGAGED: ContextVar[_Engagement | None] = ContextVar("engaged", default=None)


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
    start = {"processes": start_processes, "ray": start_ray, "dask": start_dask}[runner.name]
    return start(runner, stack, threads)
