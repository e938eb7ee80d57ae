"""Which benchmarks and tasks there are, for listings and for checking names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kvpolicy.benchmarks.ruler.tasks import BENCHMARK as RULER
from kvpolicy.benchmarks.ruler.tasks import RULER_TASKS
from kvpolicy.benchmarks.ruler.tasks import VERSION as RULER_VERSION
from kvpolicy.benchmarks.ruler.texts import SOURCES
from kvpolicy.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A row of `kvp benchmarks`.

    Attributes:
        benchmark: Name of the benchmark.
        version: Version of the benchmark; results of different versions are not compared.
        task: Name of the task.
        needs_text: The outside text that the task needs (`essays`, `squad`, `hotpotqa`), or None.
        text_source: What that text is and how to get it, or None.
        max_new_tokens: Tokens that the model may generate.
        match: Whether the string match wants `all` references or `any`.
        description: One line for people.
    """

    benchmark: str
    version: str
    task: str
    needs_text: str | None
    text_source: str | None
    max_new_tokens: int
    match: Literal["all", "any"]
    description: str

    @property
    def is_default(self) -> bool:
        """Whether the task runs without anything that the user must bring."""
        return self.needs_text is None


_BENCHMARKS: Mapping[str, tuple[TaskInfo, ...]] = MappingProxyType(
    {
        RULER: tuple(
            TaskInfo(
                benchmark=RULER,
                version=RULER_VERSION,
                task=task.name,
                needs_text=task.text,
                text_source=None if task.text is None else SOURCES[task.text],
                max_new_tokens=task.max_new_tokens,
                match=task.match,
                description=task.description,
            )
            for task in RULER_TASKS.values()
        )
    }
)


def benchmark_names() -> tuple[str, ...]:
    """Names of all benchmarks."""
    return tuple(_BENCHMARKS)


def tasks_of(benchmark: str) -> tuple[TaskInfo, ...]:
    """The tasks of a benchmark, in its own order.

    Raises:
        InputError: There is no such benchmark.
    """
    if benchmark not in _BENCHMARKS:
        raise InputError(f"unknown benchmark {benchmark!r}: choose one of {', '.join(_BENCHMARKS)}")
    return _BENCHMARKS[benchmark]


def task_info(benchmark: str, task: str) -> TaskInfo:
    """One task of a benchmark.

    Raises:
        InputError: There is no such benchmark or task.
    """
    rows = {row.task: row for row in tasks_of(benchmark)}
    if task not in rows:
        raise InputError(f"{benchmark} has no task {task!r}: choose one of {', '.join(rows)}")
    return rows[task]
