"""What a page asks when the catalog has no comparison of the curves that it shows.

Comparing is science, which dashboards do not import: whoever makes the application gives what answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ComparisonQuestion:
    """Which curves are to be compared, sample by sample.

    Attributes:
        run_id: run of the evaluation.
        benchmark: of the curves.
        setting: of the curves.
        metric: of the curves.
        task: one of them, or the mean over all.
        seeds: (method, seed) of all curves.
    """

    run_id: str
    benchmark: str
    setting: str
    metric: str
    task: str
    seeds: tuple[tuple[str, int], ...]


CompareScores = Callable[[ComparisonQuestion], Sequence[Mapping[str, Any]]]
"""Compares methods by the scores of samples: rows like those of the table `comparisons`, none if scores are lost."""


def compare_nothing(question: ComparisonQuestion) -> Sequence[Mapping[str, Any]]:
    """Stands for a way to compare where there is none: differences then have no intervals."""
    del question
    return ()
