"""Facts of a task that are known before any sample of it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A row of `kvp benchmarks`.

    Attributes:
        benchmark: Name of the benchmark.
        version: Version of the benchmark; results of different versions are not compared.
        task: Name of the task, unique over all benchmarks.
        source: The source of outside files that the task needs (a name of `SOURCES`), or None.
        metrics: Metrics besides the fidelity to the full cache, which is always measured.
        max_new_tokens: Tokens that the model may generate; 0 where nothing is generated.
        match: Whether the string match wants `all` references or `any`.
        description: One line for people.
    """

    benchmark: str
    version: str
    task: str
    source: str | None
    metrics: tuple[str, ...]
    max_new_tokens: int
    description: str
    match: Literal["all", "any"] = "all"

    @property
    def is_generated(self) -> bool:
        """Whether the model's own answer is scored."""
        return self.max_new_tokens > 0
