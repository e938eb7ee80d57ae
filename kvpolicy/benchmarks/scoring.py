"""RULER's string match: how an answer in words is judged (arXiv 2404.06654, section 3; NVIDIA/RULER, `eval/synthetic`).

Not here: fidelity to the full cache, which is judged on probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.benchmarks.sample import Sample
from kvpolicy.errors import InputError


def string_match(prediction: str, references: Sequence[str], *, match: Literal["all", "any"] = "all") -> float:
    """How many references are substrings of a prediction, ignoring case.

    Args:
        prediction: What the model wrote.
        references: What is looked for.
        match: `all` gives the share of references found; `any` gives 1 if at least one is found, else 0.

    Raises:
        InputError: There is no reference.
    """
    if not references:
        raise InputError("string match needs at least one reference, got none")
    lowered = prediction.lower()
    found = [reference.lower() in lowered for reference in references]
    return float(any(found)) if match == "any" else sum(found) / len(found)


def score_answer(sample: Sample, prediction: str) -> float:
    """String match of a prediction by the rule of the sample's task, from 0 to 1."""
    return string_match(prediction, sample.references, match=task_info(sample.benchmark, sample.task).match)
