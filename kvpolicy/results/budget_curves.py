"""Budget curves: what the scores of single examples add up to, with intervals.

Scores of one benchmark, setting and metric are a table, and tables are never mixed. A metric that only some tasks have
makes a table of their samples alone. All columns of a table meet the same bootstrap resamples.

Not for who beats whom: that is `kvpolicy.results.comparisons`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from kvpolicy.errors import InputError
from kvpolicy.names import MEAN_TASK
from kvpolicy.results.statistics import Bootstrap, Interval, IntervalTable, Resamples


@dataclass(frozen=True, kw_only=True)
class ExampleScore:
    """One figure of one example, with where it belongs."""

    sample_id: str
    benchmark: str
    task: str
    setting: str
    method: str
    seed: int
    budget: int
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A point of a budget curve; `task` is `mean` for the mean over tasks."""

    benchmark: str
    setting: str
    method: str
    seed: int
    task: str
    metric: str
    budget: int
    interval: Interval


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """All scores of one benchmark, setting and metric: a row for each example, a column for each contender and budget.

    Attributes:
        benchmark: Of all scores.
        setting: Of all scores.
        metric: Of all scores.
        tasks: Of each example.
        columns: Method, seed and budget of each column.
        values: The scores.
    """

    benchmark: str
    setting: str
    metric: str
    tasks: tuple[str, ...]
    columns: tuple[tuple[str, int, int], ...]
    values: Float[np.ndarray, "example column"]


@dataclass(frozen=True, kw_only=True)
class ResampledTable:
    """A table of scores with what curves and comparisons share: the bootstrap means over all tasks.

    Attributes:
        scores: The table.
        means: Of each of its columns.
        bootstrap: The bootstrap that drew them.
    """

    scores: ScoreTable
    means: Resamples
    bootstrap: Bootstrap

    def intervals(self, task: str) -> IntervalTable:
        """Intervals of all columns for one task, or for the mean over tasks."""
        if task == MEAN_TASK:
            return self.means.intervals(self.bootstrap.confidence)
        rows = [place for place, task_of_row in enumerate(self.scores.tasks) if task_of_row == task]
        return self.bootstrap.resample(self.scores.values[rows]).intervals(self.bootstrap.confidence)


def resample_scores(scores: Iterable[ExampleScore], bootstrap: Bootstrap) -> list[ResampledTable]:
    """Sort scores into tables, and resample the examples of each.

    Args:
        scores: Scores of all examples.
        bootstrap: The bootstrap.

    Raises:
        InputError: If an example lacks a score that others of its table have.
    """
    return [
        ResampledTable(scores=table, means=bootstrap.resample(table.values, strata=table.tasks), bootstrap=bootstrap)
        for table in _score_tables(scores)
    ]


def budget_curves(tables: Iterable[ResampledTable]) -> list[CurvePoint]:
    """Points of all curves: for each task, and for the mean over tasks."""
    return [
        CurvePoint(
            benchmark=table.scores.benchmark,
            setting=table.scores.setting,
            method=method,
            seed=method_seed,
            task=task,
            metric=table.scores.metric,
            budget=budget,
            interval=intervals.interval(column),
        )
        for table in tables
        for task in (MEAN_TASK, *sorted(set(table.scores.tasks)))
        for intervals in [table.intervals(task)]
        for column, (method, method_seed, budget) in enumerate(table.scores.columns)
    ]


def _score_tables(scores: Iterable[ExampleScore]) -> list[ScoreTable]:
    """Sort scores into tables."""
    grouped: dict[tuple[str, str, str], dict[str, dict[tuple[str, int, int], float]]] = {}
    tasks: dict[tuple[str, str], str] = {}
    for score in scores:
        table = grouped.setdefault((score.benchmark, score.setting, score.metric), {})
        table.setdefault(score.sample_id, {})[score.method, score.seed, score.budget] = score.value
        tasks[score.benchmark, score.sample_id] = score.task
    tables = []
    for (benchmark, setting, metric), examples in grouped.items():
        columns = tuple(dict.fromkeys(column for values in examples.values() for column in values))
        for sample_id, values in examples.items():
            for method, seed, budget in columns:
                if (method, seed, budget) not in values:
                    raise InputError(
                        f"curves: sample {sample_id} has no {metric} of {method} (seed {seed}) at budget {budget} in "
                        f"setting {setting} of {benchmark}, which others have: judge all samples alike"
                    )
        tables.append(
            ScoreTable(
                benchmark=benchmark,
                setting=setting,
                metric=metric,
                tasks=tuple(tasks[benchmark, sample_id] for sample_id in examples),
                columns=columns,
                values=np.array([[values[column] for column in columns] for values in examples.values()]),
            )
        )
    return tables
