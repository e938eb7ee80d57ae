"""The 13 tasks of RULER as a table.

RULER is defined in "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv 2404.06654,
and by its public generator, NVIDIA/RULER (`scripts/synthetic.yaml` and `scripts/data/synthetic/`). The columns are
those that set the tasks apart; how each one is written out is in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvpolicy.benchmarks.task import TaskInfo
from kvpolicy.errors import InputError

BENCHMARK = "ruler"
VERSION = "1"
"""Changes whenever a prompt that `generate` writes changes: results of different versions are not compared."""


@dataclass(frozen=True, kw_only=True)
class RulerTask(TaskInfo):
    """One row of the table.

    Attributes:
        kind: Which writer makes it: `niah` (needles in a haystack), `vt` (variable tracking), `cwe` (common words),
            `fwe` (frequent words) or `qa` (question answering).
        haystack: Surroundings of the needles: `noise`, `essay` or `needles`; empty for tasks without needles.
        key_kind: Names a needle: `word` or `uuid`.
        value_kind: Hidden by a needle: `number` or `uuid`.
        num_keys: Needles with different keys; with a haystack of needles every line is one more.
        num_values: Values of each key.
        num_queries: Keys that the question asks for.
    """

    benchmark: str = BENCHMARK
    version: str = VERSION
    source: str | None = None
    metrics: tuple[str, ...] = ("string_match",)
    kind: str
    haystack: str = ""
    key_kind: str = ""
    value_kind: str = ""
    num_keys: int = 0
    num_values: int = 0
    num_queries: int = 0


_NEEDLES = (
    ("niah_single_1", "noise", "word", "number", 1, 1, 1, "One number hidden in repeated noise."),
    ("niah_single_2", "essay", "word", "number", 1, 1, 1, "One number hidden in essays."),
    ("niah_single_3", "essay", "word", "uuid", 1, 1, 1, "One uuid hidden in essays."),
    ("niah_multikey_1", "essay", "word", "number", 4, 1, 1, "One of four numbers hidden in essays."),
    ("niah_multikey_2", "needles", "word", "number", 1, 1, 1, "One number among nothing but needles."),
    ("niah_multikey_3", "needles", "uuid", "uuid", 1, 1, 1, "One uuid, named by a uuid, among needles."),
    ("niah_multivalue", "essay", "word", "number", 1, 4, 1, "All four numbers of one key, in essays."),
    ("niah_multiquery", "essay", "word", "number", 4, 1, 4, "The numbers of four keys, in essays."),
)
_TABLE = (
    *(
        RulerTask(
            task=task,
            kind="niah",
            max_new_tokens=128,
            description=description,
            haystack=haystack,
            key_kind=key_kind,
            value_kind=value_kind,
            num_keys=num_keys,
            num_values=num_values,
            num_queries=num_queries,
            source="essays" if haystack == "essay" else None,
        )
        for task, haystack, key_kind, value_kind, num_keys, num_values, num_queries, description in _NEEDLES
    ),
    RulerTask(
        task="vt",
        kind="vt",
        max_new_tokens=30,
        description="Every variable of a chain of four assignments, in repeated noise; one worked example.",
    ),
    RulerTask(
        task="cwe",
        kind="cwe",
        max_new_tokens=120,
        description="The ten most common words of a numbered list; one worked example where it fits.",
    ),
    RulerTask(
        task="fwe",
        kind="fwe",
        max_new_tokens=50,
        description="The three most frequent coded words, Zipf distributed with alpha 2.",
    ),
    RulerTask(
        task="qa_1",
        kind="qa",
        max_new_tokens=32,
        description="A SQuAD question, its paragraph hidden among others.",
        source="squad",
        match="any",
    ),
    RulerTask(
        task="qa_2",
        kind="qa",
        max_new_tokens=32,
        description="A HotpotQA question over two paragraphs, hidden among others.",
        source="hotpotqa",
        match="any",
    ),
)

RULER_TASKS: Mapping[str, RulerTask] = MappingProxyType({task.task: task for task in _TABLE})
"""Every task by its name, in the order of the paper."""

DEFAULT_TASKS: tuple[str, ...] = tuple(task.task for task in _TABLE if task.source is None)
"""The tasks that need no outside text."""


def ruler_task(name: str) -> RulerTask:
    """Looks a task up.

    Raises:
        InputError: RULER has no such task.
    """
    if name not in RULER_TASKS:
        raise InputError(f"ruler has no task {name!r}: choose one of {', '.join(RULER_TASKS)}")
    return RULER_TASKS[name]
