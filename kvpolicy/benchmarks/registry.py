"""Which benchmarks and tasks there are, and what writes their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from kvpolicy.benchmarks import choices, longbench, oasst2, ruler
from kvpolicy.benchmarks.request import SampleRequest
from kvpolicy.benchmarks.task import TaskInfo
from kvpolicy.errors import InputError
from kvpolicy.sample import Sample

_RULER = tuple(
    TaskInfo(
        benchmark=ruler.BENCHMARK,
        version=ruler.VERSION,
        task=task.name,
        source=task.text,
        metrics=("string_match",),
        max_new_tokens=task.max_new_tokens,
        match=task.match,
        description=task.description,
    )
    for task in ruler.RULER_TASKS.values()
)

_TASKS: Mapping[str, TaskInfo] = MappingProxyType(
    {info.task: info for info in (*_RULER, *oasst2.TASKS, *choices.TASKS, *longbench.TASKS)}
)

_WRITERS: Mapping[str, Callable[[SampleRequest], Iterator[Sample]]] = {
    ruler.BENCHMARK: ruler.ruler_samples,
    oasst2.BENCHMARK: oasst2.dialogues,
    longbench.BENCHMARK: longbench.long_samples,
    **{info.benchmark: choices.questions for info in choices.TASKS},
}


def benchmark_names() -> tuple[str, ...]:
    """Names of all benchmarks."""
    return tuple(_WRITERS)


def task_names() -> tuple[str, ...]:
    """Names of the tasks of all benchmarks; no two are alike."""
    return tuple(_TASKS)


def tasks_of(benchmark: str) -> tuple[TaskInfo, ...]:
    """The tasks of a benchmark, in its own order.

    Raises:
        InputError: There is no such benchmark.
    """
    if benchmark not in _WRITERS:
        raise InputError(f"unknown benchmark {benchmark!r}: choose one of {', '.join(_WRITERS)}")
    return tuple(info for info in _TASKS.values() if info.benchmark == benchmark)


def task_info(task: str) -> TaskInfo:
    """A task by its name.

    Raises:
        InputError: There is no such task.
    """
    if task not in _TASKS:
        raise InputError(f"unknown task {task!r}: choose one of {', '.join(_TASKS)}")
    return _TASKS[task]


def write_samples(request: SampleRequest) -> Iterator[Sample]:
    """The samples that are asked for, one after the other until there are no more.

    Raises:
        InputError: A file is not what it should be, or the task does not fit the length.
    """
    return _WRITERS[task_info(request.task).benchmark](request)
