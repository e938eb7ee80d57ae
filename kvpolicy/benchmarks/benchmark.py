"""A benchmark as it is registered: its tasks, the writer of their samples, and the parts that no two splits share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.task import TaskInfo
from kvpolicy.text.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark.

    Attributes:
        name: Its name, which every task and sample has as well.
        tasks: Its tasks, in their order.
        write: Yields the samples that a request asks for, one after the other until there are no more.
        fingerprint: Lists the parts of a sample that no other split may have: texts by a noun.
    """

    name: str
    tasks: tuple[TaskInfo, ...]
    write: Callable[[SampleRequest], Iterator[Sample]]
    fingerprint: Callable[[Sample], Mapping[str, frozenset[str]]]

    @property
    def module(self) -> str:
        """Module whose code the samples come from."""
        return self.write.__module__
