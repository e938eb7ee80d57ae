"""Who beats whom: paired differences between all methods at every budget, with the confidence that each is there.

Seeds of a method are averaged. Intervals resample the examples and, of a method that has several seeds, its seeds
(`kvpolicy.results.statistics`), so that a difference is established for the method and not for one training. Methods
that are made from the same trainings meet the same draws of them.

Percentile intervals of few examples are too narrow, and a few examples agree by chance: n of them are all on one side
with a probability of 2^(1 - n). Where that is more than the confidence leaves (at 95 %: fewer than six examples),
nothing is established, whatever the interval says. From there on verdicts on true ties, where 5 % are meant, were
measured at 11 % with six examples, 8 % with three of each of six tasks, and 6 % with twenty.

What an interval and a confidence do not correct for: they belong to one pair at one budget. Of twenty true ties about
one is called better or worse at 95 %; neighbouring budgets err together, as they share examples. And the best
baseline is chosen by the same scores that it is then compared on, which flatters it: a difference to it is, if
anything, too small.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from kvpolicy.errors import InputError
from kvpolicy.names import BOUNDS, LEARNED
from kvpolicy.results.budget_curves import ScoreTable
from kvpolicy.results.metrics import LOWER_IS_BETTER
from kvpolicy.results.statistics import Interval

BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One method against another at one budget, mean over tasks. Every pair is there in both orders.

    Attributes:
        benchmark: Benchmark of the curves.
        setting: Setting of the curves.
        metric: Metric of the curves.
        budget: Budget in tokens.
        method: The one that is better or worse.
        other: The one it is compared with.
        difference: Method minus other, paired by example, with its interval.
        confidence: Share of the bootstrap resamples in which the method is better, ties counted half: 0.5 where
            nothing is known, as where a task has one example; 1 minus that of the pair's other order. Read in both
            directions, the smaller of it and its complement, doubled, is the bootstrap's p-value of no difference.
        verdict: `better` or `worse`, in the metric's own direction, where the interval excludes 0 and there are
            examples enough; else `undecided`.
        num_seeds: Seeds of the method.
        other_num_seeds: Seeds of the other.
        seed_std: Standard deviation of the method's mean over its seeds; None of one seed.
        is_contest: Whether both are contenders: they evict, and do not know the future.
        is_best_baseline: Whether the other is the heuristic with the best mean at this budget.
    """

    benchmark: str
    setting: str
    metric: str
    budget: int
    method: str
    other: str
    difference: Interval
    confidence: float
    verdict: str
    num_seeds: int
    other_num_seeds: int
    seed_std: float | None
    is_contest: bool
    is_best_baseline: bool

    def to_row(self) -> dict[str, Any]:
        """All of it as plain values; of the difference its mean, `ci_low`, `ci_high` (None without them) and `n`."""
        return asdict(self) | self.difference.as_row("difference")


Trained = Mapping[str, str]
"""Methods that are made from something that was trained, each with the kind of artifact that it is."""


@dataclass(frozen=True, kw_only=True)
class _Entrant:
    """A method at a budget, with its seeds and their columns in the table."""

    method: str
    budget: int
    seeds: tuple[int, ...]
    columns: tuple[int, ...]


def is_heuristic(method: str, trained: Trained) -> bool:
    """Whether a method is a contender that is made from nothing that was trained."""
    return method not in BOUNDS and method not in trained


def compare_methods(tables: Iterable[ScoreTable], trained: Trained) -> list[Comparison]:
    """Compare every method with every other at every budget, in each table of scores.

    Args:
        tables: Scores of all examples, resampled.
        trained: Methods made from something trained. Those of one kind and seeds meet the same draws of trainings.

    Raises:
        InputError: If a method lacks a seed at a budget.
    """
    return [comparison for table in tables for comparison in _compare(table, trained)]


def beats_all(
    comparisons: Iterable[Comparison], trained: Trained, method: str = LEARNED
) -> dict[tuple[str, str, str], dict[int, bool]]:
    """Where a method is better than every heuristic, each by its own interval.

    Returns:
        Benchmark, setting and metric to budget to whether it is.
    """
    wins: dict[tuple[str, str, str], dict[int, bool]] = {}
    for entry in sorted(comparisons, key=lambda entry: entry.budget):
        if entry.method == method and is_heuristic(entry.other, trained):
            by_budget = wins.setdefault((entry.benchmark, entry.setting, entry.metric), {})
            by_budget[entry.budget] = by_budget.get(entry.budget, True) and entry.verdict == BETTER
    return wins


def _compare(table: ScoreTable, trained: Trained) -> Iterator[Comparison]:
    by_units: dict[str, list[_Entrant]] = defaultdict(list)
    for entrant in _entrants(table):
        by_units[f"{trained.get(entrant.method, entrant.method)} {entrant.seeds}"].append(entrant)
    entrants = [entrant for alike in by_units.values() for entrant in alike]  # as the columns of the averages
    pairs = [
        (first, second)
        for first, second in product(range(len(entrants)), repeat=2)
        if first != second and entrants[first].budget == entrants[second].budget
    ]
    if not pairs:
        return
    groups = {name: np.array([entrant.columns for entrant in alike]).T for name, alike in by_units.items()}
    averaged = table.bootstrap.average_units(table.means, groups)
    sign = -1.0 if table.metric in LOWER_IS_BETTER else 1.0
    heuristics = [index for index, entrant in enumerate(entrants) if is_heuristic(entrant.method, trained)]
    # Budget to the heuristic with the best mean there; of equals the first.
    ranked = sorted(heuristics, key=lambda index: -sign * averaged.mean[index])
    best = {entrants[index].budget: index for index in reversed(ranked)}
    differences = averaged.differences(*np.array(pairs).T)
    intervals, shares = differences.intervals(), differences.share_above_zero()
    for column, (first, second) in enumerate(pairs):
        one, other, difference = entrants[first], entrants[second], intervals[column]
        of_seeds = table.means.mean[list(one.columns)]
        yield Comparison(
            benchmark=table.benchmark,
            setting=table.setting,
            metric=table.metric,
            budget=one.budget,
            method=one.method,
            other=other.method,
            difference=difference,
            confidence=float(shares[column] if sign > 0 else 1.0 - shares[column]),
            verdict=verdict_on(difference, sign, table.bootstrap.confidence),
            num_seeds=len(one.seeds),
            other_num_seeds=len(other.seeds),
            seed_std=float(of_seeds.std(ddof=1)) if of_seeds.size > 1 else None,
            is_contest=not {one.method, other.method} & set(BOUNDS),
            is_best_baseline=second == best.get(one.budget),
        )


def _entrants(table: ScoreTable) -> list[_Entrant]:
    """By method, in the order of the table's columns, then by budget."""
    of_seed = {(method, budget, seed): index for index, (method, seed, budget) in enumerate(table.columns)}
    entrants = []
    for method in dict.fromkeys(method for method, _, _ in table.columns):
        seeds = tuple(sorted({seed for name, _, seed in of_seed if name == method}))
        for budget in sorted({budget for name, budget, _ in of_seed if name == method}):
            if missing := [seed for seed in seeds if (method, budget, seed) not in of_seed]:
                raise InputError(
                    f"comparisons: {method} has no {table.metric} of seed {missing[0]} at budget {budget} in setting "
                    f"{table.setting} of {table.benchmark}, which it has elsewhere: evaluate all seeds alike"
                )
            columns = tuple(of_seed[method, budget, seed] for seed in seeds)
            entrants.append(_Entrant(method=method, budget=budget, seeds=seeds, columns=columns))
    return entrants


def verdict_on(difference: Interval, sign: float, confidence: float) -> str:
    """What a paired difference establishes: `better`, `worse` or `undecided`.

    Args:
        difference: With its interval.
        sign: 1 where higher is better, -1 where lower is.
        confidence: Of the interval.
    """
    agree_by_chance = 2.0 ** (1 - difference.n)
    if not difference.excludes_zero or agree_by_chance > 1.0 - confidence:
        return UNDECIDED
    return BETTER if sign * difference.mean > 0 else WORSE
