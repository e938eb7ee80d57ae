"""Who beats whom: paired differences between all methods at every budget, with the confidence that each is there.

Seeds of a method are averaged. Intervals resample the examples and, of a method that has several seeds, its seeds
(`kvpolicy.results.statistics.average_units`), so that a difference is established for the method and not for one
training. Methods that are made from the same trainings meet the same draws of them.

Percentile intervals of few examples are too narrow, and a few examples agree by chance: n of them are all on one side
with a probability of 2^(1 - n). Where that is more than the confidence leaves (at 95 %: fewer than six examples),
nothing is established, whatever the interval says. From there on verdicts on true ties, where 5 % are meant, were
measured at 11 % with six examples, 8 % with three of each of six tasks, and 6 % with twenty.

What an interval and a confidence do not correct for: they belong to one pair at one budget. Of twenty true ties about
one is called better or worse at 95 %; neighbouring budgets err together, as they share examples. And the best
baseline is chosen by the same scores that it is then compared on, which flatters it: a difference to it is, if
anything, too small.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from kvpolicy.errors import InputError
from kvpolicy.methods.registry import method_names, method_type
from kvpolicy.results.budget_curves import ResampledTable, ScoreTable
from kvpolicy.results.metrics import LOWER_IS_BETTER
from kvpolicy.results.statistics import Interval, Resamples, average_units

LEARNED = "kvp"
BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One method against another at one budget, mean over tasks. Every pair is there in both orders.

    Attributes:
        benchmark: Of the curves.
        setting: Of the curves.
        metric: Of the curves.
        budget: In tokens.
        method: The one that is better or worse.
        other: The one it is compared with.
        difference: Method minus other, paired by example, with its interval.
        confidence: Share of the bootstrap resamples in which the method is better, ties counted half: 0.5 where
            nothing is known, as where a task has one example; 1 minus that of the pair's other order. Read in both
            directions, the smaller of it and its complement, doubled, is the bootstrap's p-value of no difference.
        verdict: `better` or `worse`, in the metric's own direction, where the interval excludes 0 and there are
            examples enough; else `undecided`.
        num_seeds: Of the method.
        other_num_seeds: Of the other.
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
        low, high = self.difference.ends
        interval = {"difference": self.difference.mean, "ci_low": low, "ci_high": high, "n": self.difference.n}
        return asdict(self) | interval


@dataclass(frozen=True, kw_only=True)
class _Entrant:
    """A method at a budget, with its seeds and their columns in the table."""

    method: str
    budget: int
    seeds: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def units(self) -> str:
        """What is drawn for it: trainings of one kind and seeds, or the seeds of the method itself."""
        return f"{method_type(self.method).trained or self.method} {self.seeds}"


def is_contender(method: str) -> bool:
    """Whether a method evicts and does not know the future: neither `full` nor `oracle`.

    Raises:
        InputError: If there is no such method.
    """
    kind = method_type(method)
    return kind.evicts and not kind.needs_importance


def is_heuristic(method: str) -> bool:
    """Whether a method is a contender that is made from nothing that was trained.

    Raises:
        InputError: If there is no such method.
    """
    return is_contender(method) and not method_type(method).trained


def compare_methods(tables: Iterable[ResampledTable]) -> list[Comparison]:
    """Compare every method with every other at every budget, in each table of scores.

    Args:
        tables: Scores of all examples, resampled.

    Raises:
        InputError: If a method lacks a seed at a budget, or is unknown.
    """
    comparisons = []
    for resampled in tables:
        table, means, bootstrap = resampled.scores, resampled.means, resampled.bootstrap
        by_units: dict[str, list[_Entrant]] = {}
        for entrant in _entrants(table):
            by_units.setdefault(entrant.units, []).append(entrant)
        entrants = [entrant for alike in by_units.values() for entrant in alike]  # as the columns of the averages
        groups = {name: np.array([entrant.columns for entrant in alike]).T for name, alike in by_units.items()}
        averaged = average_units(means, groups, seed=bootstrap.seed)
        spreads = [_spread(means.mean[list(entrant.columns)]) for entrant in entrants]
        comparisons += _compare(table, entrants, averaged, spreads, bootstrap.confidence)
    return comparisons


def beats_all(comparisons: Iterable[Comparison], method: str = LEARNED) -> dict[tuple[str, str, str], dict[int, bool]]:
    """Where a method is better than every heuristic, each by its own interval.

    Returns:
        Benchmark, setting and metric to budget to whether it is.
    """
    wins: dict[tuple[str, str, str], dict[int, bool]] = {}
    for entry in sorted(comparisons, key=lambda entry: entry.budget):
        if entry.method == method and is_heuristic(entry.other):
            by_budget = wins.setdefault((entry.benchmark, entry.setting, entry.metric), {})
            by_budget[entry.budget] = by_budget.get(entry.budget, True) and entry.verdict == BETTER
    return wins


def _entrants(table: ScoreTable) -> list[_Entrant]:
    """By method, in the order of tables, then by budget."""
    of_seed = {(method, budget, seed): index for index, (method, seed, budget) in enumerate(table.columns)}
    entrants = []
    for method in sorted({method for method, _, _ in table.columns}, key=method_names().index):
        seeds = sorted({seed for name, seed, _ in table.columns if name == method})
        budgets = sorted({budget for name, _, budget in table.columns if name == method})
        for budget, seed in product(budgets, seeds):
            if (method, budget, seed) not in of_seed:
                raise InputError(
                    f"comparisons: {method} has no {table.metric} of seed {seed} at budget {budget} in setting "
                    f"{table.setting} of {table.benchmark}, which it has elsewhere: judge all seeds alike"
                )
        entrants += [
            _Entrant(
                method=method,
                budget=budget,
                seeds=tuple(seeds),
                columns=tuple(of_seed[method, budget, seed] for seed in seeds),
            )
            for budget in budgets
        ]
    return entrants


def _spread(means: np.ndarray) -> float | None:
    return float(means.std(ddof=1)) if means.size > 1 else None


def _compare(
    table: ScoreTable,
    entrants: Sequence[_Entrant],
    averaged: Resamples,
    spreads: Sequence[float | None],
    confidence: float,
) -> list[Comparison]:
    pairs = [
        (first, second)
        for first, second in product(range(len(entrants)), repeat=2)
        if first != second and entrants[first].budget == entrants[second].budget
    ]
    if not pairs:
        return []
    sign = -1.0 if table.metric in LOWER_IS_BETTER else 1.0
    best = _best_baselines(entrants, sign * averaged.mean)
    differences = averaged.differences(*np.array(pairs).T)
    intervals, shares = differences.intervals(confidence), differences.share_above_zero()
    comparisons = []
    for column, (first, second) in enumerate(pairs):
        method, other, difference = entrants[first], entrants[second], intervals.interval(column)
        comparisons.append(
            Comparison(
                benchmark=table.benchmark,
                setting=table.setting,
                metric=table.metric,
                budget=method.budget,
                method=method.method,
                other=other.method,
                difference=difference,
                confidence=float(shares[column] if sign > 0 else 1.0 - shares[column]),
                verdict=verdict_on(difference, sign, confidence),
                num_seeds=len(method.columns),
                other_num_seeds=len(other.columns),
                seed_std=spreads[first],
                is_contest=is_contender(method.method) and is_contender(other.method),
                is_best_baseline=second == best.get(method.budget),
            )
        )
    return comparisons


def _best_baselines(entrants: Sequence[_Entrant], goodness: np.ndarray) -> dict[int, int]:
    """Budget to the heuristic with the best mean there; of equals the first in the order of tables."""
    best: dict[int, int] = {}
    for index, entrant in enumerate(entrants):
        if is_heuristic(entrant.method):
            leader = best.setdefault(entrant.budget, index)
            if goodness[index] > goodness[leader]:
                best[entrant.budget] = index
    return best


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
