"""The 13 tasks of RULER as a table.

RULER is defined in "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv 2404.06654,
and by its public generator, NVIDIA/RULER (`scripts/synthetic.yaml` and `scripts/data/synthetic/`). The columns are
those that set the tasks apart; how each one is written out is in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kvpolicy.errors import InputError

BENCHMARK = "ruler"
VERSION = "1"
"""Changes whenever a prompt that `generate` writes changes: results of different versions are not compared."""

TextSource = Literal["essays", "squad", "hotpotqa"]


@dataclass(frozen=True, kw_only=True)
class RulerTask:
    """One row of the table.

    Attributes:
        name: Task name, as RULER spells it.
        kind: Which writer makes it: needles in a haystack, variable tracking, common words, frequent words or
            question answering.
        max_new_tokens: Tokens that the model may generate.
        description: One line for people.
        haystack: What surrounds the needles; empty for tasks without needles.
        key_kind: What names a needle.
        value_kind: What a needle hides.
        num_keys: Needles with different keys; with a haystack of needles every line is one more.
        num_values: Values of each key.
        num_queries: Keys that the question asks for.
        text: The outside text that the task needs, or None.
        match: Whether the score is the share of `all` references, or whether `any` is found.
    """

    name: str
    kind: Literal["niah", "vt", "cwe", "fwe", "qa"]
    max_new_tokens: int
    description: str
    haystack: Literal["noise", "essay", "needles", ""] = ""
    key_kind: Literal["word", "uuid", ""] = ""
    value_kind: Literal["number", "uuid", ""] = ""
    num_keys: int = 0
    num_values: int = 0
    num_queries: int = 0
    text: TextSource | None = None
    match: Literal["all", "any"] = "all"


def _needle_task(
    name: str,
    haystack: Literal["noise", "essay", "needles"],
    key_kind: Literal["word", "uuid"],
    value_kind: Literal["number", "uuid"],
    counts: tuple[int, int, int],
    *,
    description: str,
) -> RulerTask:
    num_keys, num_values, num_queries = counts
    return RulerTask(
        name=name,
        kind="niah",
        max_new_tokens=128,
        description=description,
        haystack=haystack,
        key_kind=key_kind,
        value_kind=value_kind,
        num_keys=num_keys,
        num_values=num_values,
        num_queries=num_queries,
        text="essays" if haystack == "essay" else None,
    )


_TABLE = (
    _needle_task(
        "niah_single_1", "noise", "word", "number", (1, 1, 1), description="One number hidden in repeated noise."
    ),
    _needle_task("niah_single_2", "essay", "word", "number", (1, 1, 1), description="One number hidden in essays."),
    _needle_task("niah_single_3", "essay", "word", "uuid", (1, 1, 1), description="One uuid hidden in essays."),
    _needle_task(
        "niah_multikey_1", "essay", "word", "number", (4, 1, 1), description="One of four numbers hidden in essays."
    ),
    _needle_task(
        "niah_multikey_2", "needles", "word", "number", (1, 1, 1), description="One number among nothing but needles."
    ),
    _needle_task(
        "niah_multikey_3", "needles", "uuid", "uuid", (1, 1, 1), description="One uuid, named by a uuid, among needles."
    ),
    _needle_task(
        "niah_multivalue", "essay", "word", "number", (1, 4, 1), description="All four numbers of one key, in essays."
    ),
    _needle_task(
        "niah_multiquery", "essay", "word", "number", (4, 1, 4), description="The numbers of four keys, in essays."
    ),
    RulerTask(
        name="vt",
        kind="vt",
        max_new_tokens=30,
        description="Every variable of a chain of four assignments, in repeated noise; one worked example.",
    ),
    RulerTask(
        name="cwe",
        kind="cwe",
        max_new_tokens=120,
        description="The ten most common words of a numbered list; one worked example where it fits.",
    ),
    RulerTask(
        name="fwe",
        kind="fwe",
        max_new_tokens=50,
        description="The three most frequent coded words, Zipf distributed with alpha 2.",
    ),
    RulerTask(
        name="qa_1",
        kind="qa",
        max_new_tokens=32,
        description="A SQuAD question, its paragraph hidden among others.",
        text="squad",
        match="any",
    ),
    RulerTask(
        name="qa_2",
        kind="qa",
        max_new_tokens=32,
        description="A HotpotQA question over two paragraphs, hidden among others.",
        text="hotpotqa",
        match="any",
    ),
)

RULER_TASKS: Mapping[str, RulerTask] = MappingProxyType({task.name: task for task in _TABLE})
"""Every task by its name, in the order of the paper."""

DEFAULT_TASKS: tuple[str, ...] = tuple(task.name for task in _TABLE if task.text is None)
"""The tasks that need no outside text."""


def ruler_task(name: str) -> RulerTask:
    """Looks a task up.

    Raises:
        InputError: RULER has no such task.
    """
    if name not in RULER_TASKS:
        raise InputError(f"ruler has no task {name!r}: choose one of {', '.join(RULER_TASKS)}")
    return RULER_TASKS[name]
