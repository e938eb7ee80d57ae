"""Which benchmarks and tasks there are: our own, and those of installed packages (`kvpolicy.config.registry`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from kvpolicy.benchmarks import choices, longbench, oasst2, ruler
from kvpolicy.benchmarks.benchmark import Benchmark
from kvpolicy.benchmarks.ruler.fingerprint import fingerprint as _ruler_fingerprint
from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.task import TaskInfo
from kvpolicy.config.registry import Registry
from kvpolicy.errors import InputError
from kvpolicy.text.sample import Sample

_OWN = (
    Benchmark(name=ruler.BENCHMARK, tasks=ruler.TASKS, write=ruler.ruler_samples, fingerprint=_ruler_fingerprint),
    Benchmark(name=oasst2.BENCHMARK, tasks=oasst2.TASKS, write=oasst2.dialogues, fingerprint=oasst2.fingerprint),
    Benchmark(
        name=longbench.BENCHMARK,
        tasks=longbench.TASKS,
        write=longbench.long_samples,
        fingerprint=longbench.fingerprint,
    ),
    *(
        Benchmark(name=task.benchmark, tasks=(task,), write=choices.questions, fingerprint=choices.fingerprint)
        for task in choices.TASKS
    ),
)
_OWN_TASKS: Mapping[str, TaskInfo] = {task.task: task for benchmark in _OWN for task in benchmark.tasks}


def _problem(name: str, benchmark: Any) -> str:
    if not isinstance(benchmark, Benchmark):
        return "it is not a kvpolicy.benchmarks.benchmark.Benchmark"
    if names := {benchmark.name, *(task.benchmark for task in benchmark.tasks)} - {name}:
        return f"it or one of its tasks names the benchmark {min(names)!r}"
    if taken := sorted(task.task for task in benchmark.tasks if task.task in _OWN_TASKS):
        return f"kvpolicy itself has a task {taken[0]!r}"
    return "" if benchmark.tasks else "it has no tasks"


BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark", {benchmark.name: benchmark for benchmark in _OWN}, check=_problem
)


def task_names() -> tuple[str, ...]:
    """Names of the tasks of all benchmarks; no two are alike."""
    return tuple(_all_tasks())


def tasks_of(benchmark: str) -> tuple[TaskInfo, ...]:
    """The tasks of a benchmark, in its own order.

    Raises:
        InputError: If there is no such benchmark, or the package that offers it is broken.
    """
    return BENCHMARKS[benchmark].tasks


def task_info(task: str) -> TaskInfo:
    """A task by its name.

    Raises:
        InputError: If there is no such task.
    """
    if task in _OWN_TASKS:
        return _OWN_TASKS[task]
    tasks = _all_tasks()
    if task not in tasks:
        raise InputError(f"unknown task {task!r}: choose one of {', '.join(tasks)}")
    return tasks[task]


def write_samples(request: SampleRequest) -> Iterator[Sample]:
    """The samples that are asked for, one after the other until there are no more.

    Raises:
        InputError: If a file is not what it should be, or the task does not fit the length.
    """
    return BENCHMARKS[task_info(request.task).benchmark].write(request)


@functools.cache
def _all_tasks() -> Mapping[str, TaskInfo]:
    """All tasks, which takes importing every package that offers a benchmark."""
    tasks: dict[str, TaskInfo] = {}
    for name in BENCHMARKS.names:
        for task in BENCHMARKS[name].tasks:
            if task.task in tasks:
                raise InputError(
                    f"benchmarks {tasks[task.task].benchmark} and {name} both have a task {task.task!r}: uninstall one"
                )
            tasks[task.task] = task
    return tasks
