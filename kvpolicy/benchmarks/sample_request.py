"""A request for samples of one task, and the counts that a benchmark reports beside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvpolicy.benchmarks.sources import DataFiles
from kvpolicy.benchmarks.splits import stable_seed
from kvpolicy.text.sample import Sample


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """A sequence of samples of one task. Every sample is a pure function of this and its place in the sequence.

    Attributes:
        benchmark: Name of the benchmark.
        task: Name of the task.
        split: `train`, `validation` or `test`.
        seed: Of the set.
        length_tokens: Prompt and answer together have at most so many tokens.
        tokenizer: Lengths are counted in its tokens.
        files: The outside files.
        language: Code of the one language that is wanted, such as `en`; empty for all, where a task has several.
        reported: Counts, by the reason, of what was left out or is not as asked for; the benchmark adds to it.
    """

    benchmark: str
    task: str
    split: str
    seed: int
    length_tokens: int
    tokenizer: Any
    files: DataFiles
    language: str = ""
    reported: Counter[str] = field(default_factory=Counter)

    def sample_id(self, index: int) -> str:
        """Id of the sample at a place."""
        return f"{self.benchmark}/{self.task}/{self.split}/{self.seed}/{index}/{self.length_tokens}"

    def sample(self, index: int, **parts: Any) -> Sample:
        """Build the sample at a place from the other fields of a sample, by name."""
        name = self.sample_id(index)
        return Sample(sample_id=name, benchmark=self.benchmark, task=self.task, split=self.split, **parts)

    def rng(self, *parts: object) -> Random:
        """A generator for one thing that is drawn; other names, other numbers."""
        return Random(stable_seed(self.benchmark, self.task, self.split, self.seed, *parts))

    def report(self, reason: str, count: int = 1) -> None:
        """Note that so many things were left out, or are not as asked for, for a reason."""
        if count:
            self.reported[f"{self.task}: {reason}"] += count
