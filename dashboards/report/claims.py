"""Claims about wins, in words: the learned policies against every baseline and the oracle, budget by budget.

A *baseline* is a method that evicts, does not know the future, and is not made from a policy set of ours: the
heuristics, and what others learn. A method *beats* another where the interval of their paired difference excludes 0 on
its side. Nothing is computed here but means over seeds and ratios: differences, intervals and verdicts are the
catalog's (`comparisons`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

from dashboards.figures.series import Panel, Point
from dashboards.figures.styles import competed_for, in_order, method_order, metric_order
from dashboards.grouping import Place, Row, grouped
from dashboards.rendering.formats import counted, listed, number, percent, with_interval
from kvpolicy.names import MEAN_TASK
from kvpolicy.results.comparisons import BETTER, UNDECIDED, WORSE
from kvpolicy.results.metrics import LOWER_IS_BETTER


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """The other side of a claim.

    Attributes:
        method: the other method.
        value: its mean.
        difference: the claimed method minus this one.
        low: lower end of its interval; None where there is none.
        high: upper end.
        verdict: "better", "worse" or "undecided", of the claimed method.
        confidence: share of the resamples in which the claimed method is better.
    """

    method: str
    value: float
    difference: float
    low: float | None
    high: float | None
    verdict: str
    confidence: float

    @property
    def difference_words(self) -> str:
        """The difference with its interval."""
        return with_interval(self.difference, self.low, self.high, signed=True)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One method at one budget.

    Attributes:
        place: benchmark and setting of the curves.
        metric: of the curves.
        task: "mean", or one task.
        budget: in tokens.
        method: the claimed method.
        point: its mean over samples and seeds, with its interval.
        baselines: what it should beat, the strongest first.
        oracle: the ranking by true importance, where it was evaluated.
        variants: the other learned methods.
        num_seeds: of the method.
        seed_std: spread of its mean over seeds, where there are several.
    """

    place: Place
    metric: str
    task: str
    budget: int
    method: str
    point: Point
    baselines: tuple[Opponent, ...]
    oracle: Opponent | None
    variants: tuple[Opponent, ...]
    num_seeds: int
    seed_std: float | None

    @property
    def value(self) -> float:
        """Its mean over samples and seeds."""
        return self.point.value

    @property
    def not_beaten(self) -> tuple[Opponent, ...]:
        """The baselines that it does not beat."""
        return tuple(other for other in self.baselines if other.verdict != BETTER)

    @property
    def wins(self) -> bool:
        """Whether it beats every baseline."""
        return bool(self.baselines) and not self.not_beaten

    @property
    def toughest(self) -> Opponent | None:
        """The baseline that stands strongest against it: one that it loses to, or else the best one not beaten."""
        ranks = {WORSE: 0, UNDECIDED: 1, BETTER: 2}
        return min(self.baselines, key=lambda other: ranks[other.verdict], default=None)


def learned_methods(curves: Iterable[Row]) -> list[str]:
    """Methods that are made from policy sets, the main one first."""
    learned = {row["method"] for row in curves if row["policy_set_id"].startswith("policy_set-")}
    return in_order(learned)


def ordered_metrics(metrics: Iterable[str]) -> list[str]:
    """Those that methods compete for, the leading one first."""
    return competed_for(sorted(set(metrics), key=metric_order))


def make_claims(comparisons: Iterable[Row], panels: Sequence[Panel], learned: Sequence[str]) -> list[Claim]:
    """The claims of every learned method at every budget, in the order of the panels.

    Args:
        comparisons: rows of the table `comparisons`; those of single tasks have a `task` as well.
        panels: the curves of the same evaluation.
        learned: the methods whose claims are wanted.
    """
    key_of = itemgetter("benchmark", "setting", "metric", "task", "method", "budget")
    rows = grouped(({"task": MEAN_TASK} | dict(row) for row in comparisons), key_of)
    return [
        _claim(panel, rows[key], learned)
        for panel in panels
        for method, budget in product(learned, panel.budgets)
        if (key := (panel.benchmark, panel.setting, panel.metric, panel.task, method, budget)) in rows
        and (method, budget) in panel.points
    ]


def _claim(panel: Panel, rows: Sequence[Row], learned: Sequence[str]) -> Claim:
    method, budget = rows[0]["method"], rows[0]["budget"]
    others = [
        Opponent(
            method=row["other"],
            value=panel.points[other].value if (other := (row["other"], budget)) in panel.points else math.nan,
            difference=row["difference"],
            low=row["ci_low"],
            high=row["ci_high"],
            verdict=row["verdict"],
            confidence=row["confidence"],
        )
        for row in rows
    ]
    rivals = {row["other"] for row in rows if row["is_contest"]} - set(learned)
    sign = 1.0 if panel.metric in LOWER_IS_BETTER else -1.0
    return Claim(
        place=(panel.benchmark, panel.setting),
        metric=panel.metric,
        task=panel.task,
        budget=budget,
        method=method,
        point=panel.points[method, budget],
        baselines=tuple(
            sorted(
                (other for other in others if other.method in rivals),
                key=lambda other: (-sign * other.difference, method_order(other.method)),
            )
        ),
        oracle=next((other for other in others if other.method == "oracle"), None),
        variants=tuple(other for other in others if other.method in learned),
        num_seeds=int(rows[0]["num_seeds"]),
        seed_std=rows[0]["seed_std"],
    )


def ratio(claim: Claim, other: Opponent | None) -> str:
    """The claimed method's value over another's; a dash where that is 0 or unknown."""
    if other is None or not other.value or other.value != other.value:
        return number(None)
    return number(claim.value / other.value)


def claim_words(claim: Claim, share: float | None) -> str:
    """One sentence: whether a method beats every baseline at a budget, and else whom it does not beat, and by how much.

    Args:
        claim: the claim.
        share: the budget's share of the mean context, where that is known.
    """
    at = f"{claim.budget} tokens" + (f" ({percent(share)} of the context)" if share else "")
    if not claim.baselines:
        return f"{at}: {claim.method} {number(claim.value)}; no baseline was evaluated here, so nothing is claimed."
    if claim.wins:
        best = claim.baselines[0]
        return (
            f"{at}: {claim.method} beats {_all_of(len(claim.baselines))}. The best of them, {best.method}, has "
            f"{number(best.value)} against {number(claim.value)}: difference {best.difference_words}."
        )
    parts = []
    for verdict, words in ((WORSE, "it is worse than"), (UNDECIDED, "undecided against")):
        if some := [other for other in claim.not_beaten if other.verdict == verdict]:
            parts.append(f"{words} {listed(f'{other.method} (difference {other.difference_words})' for other in some)}")
    return f"{at}: {claim.method} ({number(claim.value)}) does not beat every baseline: {'; '.join(parts)}."


def summary_words(claims: Sequence[Claim], describe: Callable[[Claim], str]) -> str:
    """One sentence over all budgets of one method, benchmark, setting, metric and task.

    Args:
        claims: of one curve; there must be one.
        describe: words for where the claims stand, such as the benchmark and setting.
    """
    first = claims[0]
    won = [claim for claim in claims if claim.wins]
    start = f"{describe(first)}: {first.method}"
    if len(won) == len(claims):
        return f"{start} beats every baseline at {_every(claims)}."
    where = listed(f"{claim.budget} tokens ({_some(claim)})" for claim in claims if not claim.wins)
    return f"{start} beats every baseline at {len(won) or 'none'} of {counted(len(claims), 'budget')}: not at {where}."


def oracle_words(claims: Sequence[Claim], describe: Callable[[Claim], str]) -> str:
    """How near a method comes to the oracle, and where it stays within twice its value; nothing where that is unknown.

    Only of metrics where lower is better: twice the oracle's share of right answers would mean nothing.
    """
    known = [claim for claim in claims if claim.oracle is not None and claim.oracle.value > 0]
    if not known or known[0].metric not in LOWER_IS_BETTER:
        return ""
    factors = {claim.budget: claim.value / claim.oracle.value for claim in known if claim.oracle}
    within = [str(budget) for budget, factor in factors.items() if factor <= 2]
    where = f"at {listed(within)} tokens" if within else "nowhere"
    where = "everywhere" if len(within) == len(known) else where
    span = f"{number(min(factors.values()))} to {number(max(factors.values()))} times"
    start = f"{describe(known[0])}: {known[0].method} has {span} the oracle's value"
    return f"{start} (ratios of means, without intervals); it is at most twice {where}."


def _every(claims: Sequence[Claim]) -> str:
    count, budgets = len(claims), [claim.budget for claim in claims]
    if count == 1:
        return f"the one budget, {budgets[0]} tokens"
    return f"every budget, {min(budgets)} to {max(budgets)} tokens ({count} of {count})"


def _all_of(count: int) -> str:
    return "the one baseline" if count == 1 else f"each of the {count} baselines"


def _some(claim: Claim) -> str:
    """Methods that a claim does not beat: two by name, of more the strongest one."""
    if claim.toughest is None:
        return "no baseline was evaluated"
    names = [claim.toughest.method, *(o.method for o in claim.not_beaten if o.method != claim.toughest.method)]
    return listed(names if len(names) <= 2 else [names[0], f"{len(names) - 1} more"])
