"""Budget curves: what the scores of single examples add up to, with intervals.

Scores of one benchmark, setting and metric are a table, and tables are never mixed. A metric that only some tasks have
makes a table of their samples alone. All columns of a table meet the same bootstrap resamples.

Not for who beats whom: that is `kvpolicy.comparisons`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from kvpolicy.errors import InputError
from kvpolicy.statistics import Interval, bootstrap_table

MEAN_TASK = "mean"


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


def budget_curves(
    scores: Iterable[ExampleScore], *, seed: int, num_resamples: int, confidence: float
) -> list[CurvePoint]:
    """Points of all curves: for each task, and for the mean over tasks.

    Args:
        scores: Scores of all examples.
        seed: Of the bootstrap.
        num_resamples: Of the bootstrap.
        confidence: Of the intervals.

    Raises:
        InputError: If an example lacks a score that others of its table have.
    """
    points = []
    for table in score_tables(scores):
        for task in (MEAN_TASK, *sorted(set(table.tasks))):
            rows = [index for index, task_of_row in enumerate(table.tasks) if task in (MEAN_TASK, task_of_row)]
            intervals = bootstrap_table(
                table.values[rows],
                strata=[table.tasks[row] for row in rows],
                seed=seed,
                num_resamples=num_resamples,
                confidence=confidence,
            )
            points += [
                CurvePoint(
                    benchmark=table.benchmark,
                    setting=table.setting,
                    method=method,
                    seed=method_seed,
                    task=task,
                    metric=table.metric,
                    budget=budget,
                    interval=intervals.interval(column),
                )
                for column, (method, method_seed, budget) in enumerate(table.columns)
            ]
    return points


def score_tables(scores: Iterable[ExampleScore]) -> list[ScoreTable]:
    """Sort scores into tables.

    Raises:
        InputError: If an example lacks a score that others of its table have.
    """
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
