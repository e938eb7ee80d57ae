"""Whether a newly trained policy set takes the place of the present one: the challenger against the champion.

Both have ranked the same held-out examples at the same budgets. They are compared by fidelity, the KL divergence from
the full cache in nats, as it resolves what a small model's answers cannot. Of each example the statistic is the mean
over budgets of challenger minus champion; its mean over tasks has a paired bootstrap interval
(`kvpolicy.results.statistics`) and is called better or worse by the rule that compares methods
(`kvpolicy.results.comparisons`).

A better mean may hide a budget at which the challenger is worse, since small budgets have most of the KL. So at every
budget the mean over tasks may be worse by a margin at most, relative to the champion's there. This is asked of the
estimate, not of its interval: a budget that few examples make look bad keeps the champion, the side to err on. Where
the champion's KL is below `LEAST_KL` the margin is relative to that, as bfloat16 leaves so much of no difference.

The interval is over examples alone. It says that this policy set is better than that one, not that its training is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpolicy.config.settings import NotNegative, Settings
from kvpolicy.errors import InputError
from kvpolicy.results.comparisons import BETTER, UNDECIDED, WORSE, verdict_on
from kvpolicy.results.metrics import FIDELITY
from kvpolicy.results.scores import ExampleScore
from kvpolicy.results.statistics import Bootstrap, Interval

LEAST_KL = 1e-3  # nats
_LOWER_IS_BETTER = -1.0


@dataclass(frozen=True, kw_only=True)
class PromoteConfig(Settings):
    """When a new policy set becomes the champion."""

    margin: NotNegative = 0.05
    """How much worse the new set may be at a single budget, as a share of the champion's KL there."""


@dataclass(frozen=True, kw_only=True)
class PromotionDecision:
    """What was decided, and by which figures; there are none where nothing was compared.

    Attributes:
        promoted: Whether the challenger becomes the champion.
        reason: Why, in one line.
        difference: Challenger minus champion in nats of KL, mean over budgets and tasks.
        worst_budget: Budget at which the challenger is worst against the champion, in tokens.
        worst_change: How much worse it is there, as a share of the champion's KL; negative where it is better.
    """

    promoted: bool
    reason: str
    difference: Interval | None = None
    worst_budget: int | None = None
    worst_change: float | None = None


FIRST_CHAMPION = PromotionDecision(promoted=True, reason="there was no champion yet")


def decide_promotion(
    challenger: Sequence[ExampleScore], champion: Sequence[ExampleScore], config: PromoteConfig, bootstrap: Bootstrap
) -> PromotionDecision:
    """Decide between two policy sets.

    Args:
        challenger: KL of the new one: one score for each example and budget, all of one setting.
        champion: The same of the present one.
        config: When to promote.
        bootstrap: The bootstrap over examples.

    Raises:
        InputError: If the two were not evaluated on the same examples at the same budgets.
    """
    new, old = _by_example(challenger), _by_example(champion)
    examples, budgets = list(dict.fromkeys(key[:3] for key in new)), sorted({budget for *_, budget in new})
    if new.keys() != old.keys() or len(new) != len(examples) * len(budgets) or not new:
        raise InputError(
            f"promotion: challenger and champion have {len(new)} and {len(old)} scores, {len(new.keys() & old)} in "
            "common: evaluate both on the same examples, each at the same budgets"
        )
    a, b = (np.array([[scores[*one, budget] for budget in budgets] for one in examples]) for scores in (new, old))
    resamples = bootstrap.resample(
        np.column_stack([a, b, (a - b).mean(axis=1)]), strata=[f"{benchmark} {task}" for benchmark, task, _ in examples]
    )
    difference = resamples.intervals()[-1]
    means, of_champion = np.split(resamples.mean[:-1], 2)
    changes = (means - of_champion) / np.maximum(of_champion, LEAST_KL)
    worst = int(changes.argmax())
    worst_budget, worst_change = budgets[worst], float(changes[worst])
    promoted, reason = _decide(difference, worst_budget, worst_change, config.margin, bootstrap.confidence)
    return PromotionDecision(
        promoted=promoted, reason=reason, difference=difference, worst_budget=worst_budget, worst_change=worst_change
    )


def _decide(
    difference: Interval, worst_budget: int, worst_change: float, margin: float, confidence: float
) -> tuple[bool, str]:
    least = 1 - math.floor(math.log2(1.0 - confidence))
    if difference.n < least:
        return False, f"{difference.n} examples are too few: at {confidence:.0%} it takes at least {least}"
    if difference.smallest_stratum == 1:
        return False, "a task has one example, whose spread is unknown: evaluate at least two of each"
    verdict = verdict_on(difference, _LOWER_IS_BETTER, confidence)
    figures = f"KL differs by {difference.mean:+.4g} nats, {difference.low:+.4g} to {difference.high:+.4g}"
    if verdict != BETTER:
        return False, {WORSE: f"worse: {figures}", UNDECIDED: f"undecided: {figures}"}[verdict]
    at_worst = f"at budget {worst_budget} by {worst_change:+.1%}, where {margin:.1%} is allowed"
    if worst_change > margin:
        return False, f"better on average ({figures}), but worse {at_worst}"
    return True, f"better: {figures}; at worst {at_worst}"


def _by_example(scores: Sequence[ExampleScore]) -> dict[tuple[str, str, str, int], float]:
    """Benchmark, task, sample and budget to the score."""
    by_example = {(score.benchmark, score.task, score.sample_id, score.budget): score.value for score in scores}
    if len(by_example) < len(scores) or any(score.metric != FIDELITY for score in scores):
        raise InputError(
            f"promotion: expected {FIDELITY} once for each example and budget: pass the scores of one setting and one "
            "policy set"
        )
    return by_example
