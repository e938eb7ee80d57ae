"""Who wins, in words: the learned policies against every baseline and the oracle, budget by budget.

A *baseline* is a method that evicts, does not know the future, and is not made from a policy set of ours: the
heuristics, and what others learn. A method *beats* another where the interval of their paired difference excludes 0 on
its side. Nothing is computed here but means over seeds and ratios: differences, intervals and verdicts are the
catalog's (`comparisons`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards.figures.series import Panel
from dashboards.figures.styles import in_order, method_order, metric_order
from dashboards.rendering.formats import counted, interval, listed, number, percent
from kvpolicy.names import MEAN_TASK
from kvpolicy.results.comparisons import BETTER, UNDECIDED, WORSE
from kvpolicy.results.metrics import ANALYSES, LOWER_IS_BETTER

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """What a claim is made against.

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


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One method at one budget.

    Attributes:
        benchmark: of the curves.
        setting: of the curves.
        metric: of the curves.
        task: "mean", or one task.
        budget: in tokens.
        method: the claimed method.
        value: its mean over samples and seeds.
        baselines: what it should beat, the strongest first.
        oracle: the ranking by true importance, where it was judged.
        variants: the other own methods.
        num_seeds: of the method.
        seed_std: spread of its mean over seeds, where there are several.
    """

    benchmark: str
    setting: str
    metric: str
    task: str
    budget: int
    method: str
    value: float
    baselines: tuple[Opponent, ...]
    oracle: Opponent | None
    variants: tuple[Opponent, ...]
    num_seeds: int
    seed_std: float | None

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


def own_methods(curves: Iterable[Row]) -> list[str]:
    """Methods that are made from policy sets, the main one first."""
    learned = {row["method"] for row in curves if row["policy_set_id"].startswith("policy_set-")}
    return in_order(learned)


def ordered_metrics(metrics: Iterable[str]) -> list[str]:
    """Those that are competed for, the leading one first; fidelity over the answer alone only without the other."""
    there = sorted(set(metrics) - set(ANALYSES), key=metric_order)
    return [name for name in there if name != "kl_answer" or "kl" not in there]


def make_claims(comparisons: Iterable[Row], panels: Sequence[Panel], learned: Sequence[str]) -> list[Claim]:
    """The claims of every learned method at every budget, in the order of the panels.

    Args:
        comparisons: rows of the table `comparisons`; those of single tasks have a `task` as well.
        panels: the curves of the same evaluation.
        learned: the methods whose claims are wanted.
    """
    rows: dict[tuple[Any, ...], list[Row]] = {}
    for row in comparisons:
        task = row.get("task", MEAN_TASK)
        key = (row["benchmark"], row["setting"], row["metric"], task, row["method"], row["budget"])
        rows.setdefault(key, []).append(row)
    claims = []
    for panel in panels:
        values = {key: point.value for key, point in panel.points.items()}
        for method in learned:
            for budget in panel.budgets:
                matching = rows.get((panel.benchmark, panel.setting, panel.metric, panel.task, method, budget), [])
                if matching and (method, budget) in values:
                    claims.append(_claim(panel, matching, values, learned))
    return claims


def _claim(panel: Panel, rows: Sequence[Row], values: Mapping[tuple[str, int], float], learned: Sequence[str]) -> Claim:
    method, budget = rows[0]["method"], rows[0]["budget"]
    others = [_opponent(row, values.get((row["other"], budget))) for row in rows]
    rivals = {row["other"] for row in rows if row["is_contest"]} - set(learned)
    sign = 1.0 if panel.metric in LOWER_IS_BETTER else -1.0
    return Claim(
        benchmark=panel.benchmark,
        setting=panel.setting,
        metric=panel.metric,
        task=panel.task,
        budget=budget,
        method=method,
        value=values[method, budget],
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


def _opponent(row: Row, value: float | None) -> Opponent:
    return Opponent(
        method=row["other"],
        value=float("nan") if value is None else value,
        difference=row["difference"],
        low=row["ci_low"],
        high=row["ci_high"],
        verdict=row["verdict"],
        confidence=row["confidence"],
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
        return f"{at}: {claim.method} {number(claim.value)}; no baseline was judged here, so nothing is claimed."
    if claim.wins:
        best = claim.baselines[0]
        return (
            f"{at}: {claim.method} beats {_all_of(len(claim.baselines))}. The best of them, {best.method}, has "
            f"{number(best.value)} against {number(claim.value)}: difference {_difference(best)}."
        )
    parts = []
    for verdict, words in ((WORSE, "it is worse than"), (UNDECIDED, "undecided against")):
        if some := [other for other in claim.not_beaten if other.verdict == verdict]:
            parts.append(f"{words} {listed(f'{other.method} (difference {_difference(other)})' for other in some)}")
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
    if not won:
        return f"{start} beats every baseline at none of {counted(len(claims), 'budget')}: not at {where}."
    return f"{start} beats every baseline at {len(won)} of {counted(len(claims), 'budget')}: not at {where}."


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
    budgets = [claim.budget for claim in claims]
    if len(budgets) == 1:
        return f"the one budget, {budgets[0]} tokens"
    return f"every budget, {min(budgets)} to {max(budgets)} tokens ({len(budgets)} of {len(budgets)})"


def _all_of(count: int) -> str:
    return "the one baseline" if count == 1 else f"each of the {count} baselines"


def _some(claim: Claim) -> str:
    """Whom a claim does not beat: two by name, of more the one that stands strongest."""
    if claim.toughest is None:
        return "no baseline was judged"
    names = [claim.toughest.method, *(o.method for o in claim.not_beaten if o.method != claim.toughest.method)]
    return listed(names if len(names) <= 2 else [names[0], f"{len(names) - 1} more"])


def _difference(other: Opponent) -> str:
    return f"{number(other.difference, signed=True)} {interval(other.low, other.high, signed=True)}"
