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
from kvpolicy.results.scores import ExampleScore
from kvpolicy.results.statistics import Bootstrap, Interval, Resamples


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
    """All scores of one benchmark, setting and metric, with the bootstrap means that curves and comparisons share.

    A row of scores for each example, a column for each contender and budget.

    Attributes:
        benchmark: Benchmark of all scores.
        setting: Setting of all scores.
        metric: Metric of all scores.
        tasks: Task of each example.
        columns: Method, seed and budget of each column.
        values: The scores.
        means: Bootstrap means of each column over all tasks.
        bootstrap: The bootstrap that drew them.
    """

    benchmark: str
    setting: str
    metric: str
    tasks: tuple[str, ...]
    columns: tuple[tuple[str, int, int], ...]
    values: Float[np.ndarray, "example column"]
    means: Resamples
    bootstrap: Bootstrap

    def intervals(self, task: str) -> list[Interval]:
        """Intervals of all columns for one task, or for the mean over tasks."""
        if task == MEAN_TASK:
            return self.means.intervals()
        return self.bootstrap.resample(self.values[np.array(self.tasks) == task]).intervals()


def resample_scores(scores: Iterable[ExampleScore], bootstrap: Bootstrap) -> list[ScoreTable]:
    """Sort scores into tables, and resample the examples of each.

    Args:
        scores: Scores of all examples.
        bootstrap: The bootstrap.

    Raises:
        InputError: If an example lacks a score that others of its table have.
    """
    grouped: dict[tuple[str, str, str], dict[tuple[str, str], dict[tuple[str, int, int], float]]] = {}
    for score in scores:
        table = grouped.setdefault((score.benchmark, score.setting, score.metric), {})
        table.setdefault((score.sample_id, score.task), {})[score.method, score.seed, score.budget] = score.value
    tables = []
    for (benchmark, setting, metric), examples in grouped.items():
        columns = tuple(dict.fromkeys(column for values in examples.values() for column in values))
        for (sample_id, _), values in examples.items():
            if missing := [column for column in columns if column not in values]:
                method, seed, budget = missing[0]
                raise InputError(
                    f"curves: sample {sample_id} has no {metric} of {method} (seed {seed}) at budget {budget} in "
                    f"setting {setting} of {benchmark}, which others have: evaluate all samples alike"
                )
        tasks = tuple(task for _, task in examples)
        scored = np.array([[values[column] for column in columns] for values in examples.values()])
        tables.append(
            ScoreTable(
                benchmark=benchmark,
                setting=setting,
                metric=metric,
                tasks=tasks,
                columns=columns,
                values=scored,
                means=bootstrap.resample(scored, strata=tasks),
                bootstrap=bootstrap,
            )
        )
    return tables


def budget_curves(tables: Iterable[ScoreTable]) -> list[CurvePoint]:
    """Points of all curves: for each task, and for the mean over tasks."""
    return [
        CurvePoint(
            benchmark=table.benchmark,
            setting=table.setting,
            method=method,
            seed=seed,
            task=task,
            metric=table.metric,
            budget=budget,
            interval=interval,
        )
        for table in tables
        for task in (MEAN_TASK, *sorted(set(table.tasks)))
        for (method, seed, budget), interval in zip(table.columns, table.intervals(task), strict=True)
    ]
