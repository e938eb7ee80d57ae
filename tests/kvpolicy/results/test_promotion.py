"""Champion and challenger on made-up scores: better, worse, undecided, the margin, too few examples, ties."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import InputError
from kvpolicy.results.promotion import LEAST_KL, PromoteConfig, decide_promotion
from kvpolicy.results.statistics import Bootstrap
from tests.kvpolicy.example_scores import BOOTSTRAP, example_scores

BUDGETS = (64, 128)
TASKS = ("vt",) * 4 + ("cwe",) * 4


def champion(budgets=BUDGETS, tasks=TASKS):
    """KL of each example and budget; examples differ by far more than policies do."""
    return np.random.default_rng(0).uniform(1, 10, size=(len(tasks), len(budgets)))


def scores(values, *, budgets=BUDGETS, tasks=TASKS, seed=0):
    columns = zip(budgets, np.asarray(values).T, strict=True)
    return [
        score for budget, own in columns for score in example_scores("kvp", own, tasks=tasks, seed=seed, budget=budget)
    ]


def decide(new, old, *, margin=0.05, tasks=TASKS, **changes):
    return decide_promotion(
        scores(new, tasks=tasks, seed=1),
        scores(old, tasks=tasks),
        PromoteConfig(margin=margin),
        Bootstrap(**BOOTSTRAP | changes),
    )


def test_one_that_is_better_everywhere_is_promoted():
    old = champion()
    decision = decide(0.9 * old, old)
    assert decision.promoted
    assert decision.reason.startswith("better: KL differs by -")
    assert decision.worst_change == pytest.approx(-0.1)
    assert decision.difference.high < 0


def test_the_difference_is_paired_and_the_mean_over_budgets_then_tasks():
    old = champion()
    new = old + np.random.default_rng(1).normal(size=old.shape)
    difference = decide(new, old).difference
    alone = Bootstrap(**BOOTSTRAP).mean((new - old).mean(axis=1), strata=TASKS)
    assert dataclasses.astuple(difference) == pytest.approx(dataclasses.astuple(alone))


@pytest.mark.parametrize(
    ("factor", "said"), [(1.1, "worse: "), (1.0, "undecided: ")], ids=["worse", "a tie to the last digit"]
)
def test_one_that_is_worse_or_the_same_is_not(factor, said):
    decision = decide(factor * champion(), champion())
    assert not decision.promoted
    assert decision.reason.startswith(said)


def test_a_difference_that_chance_explains_is_undecided():
    old = champion()
    signs = np.tile([1.0, -1.0], len(TASKS) // 2)[:, np.newaxis]
    decision = decide(old + signs - 0.01, old)
    assert decision.difference.mean < 0
    assert not decision.promoted
    assert decision.reason.startswith("undecided: ")


def test_a_better_mean_does_not_excuse_one_budget():
    old = champion()
    for_one = np.array([0.5, 1.06])
    decision = decide(for_one * old, old)
    assert not decision.promoted
    assert "better on average" in decision.reason
    assert "worse at budget 128 by +6.0%, where 5.0% is allowed" in decision.reason
    assert decision.worst_budget == 128
    assert decision.difference.high < 0
    assert decide(for_one * old, old, margin=0.07).promoted
    assert decide(np.array([0.5, 1.04]) * old, old).promoted


def test_the_margin_at_a_budget_is_of_means_over_tasks():
    """Not of examples: one that is much worse is made up for by others of its budget."""
    old = np.ones((len(TASKS), 2))
    new = 0.5 * old
    new[0, 1] = 2.0
    decision = decide(new, old)
    assert decision.worst_change == pytest.approx((2.0 + 3 * 0.5 + 4 * 0.5) / 8 - 1)
    assert decision.promoted


def test_where_nothing_is_lost_rounding_keeps_no_one_from_being_better():
    old = champion()
    old[:, 1] = 0.0
    new = 0.9 * old
    new[:, 1] = 1e-5
    decision = decide(new, old)
    assert (decision.worst_budget, decision.promoted) == (128, True)
    assert decision.worst_change == pytest.approx(1e-5 / LEAST_KL)


@pytest.mark.parametrize(("count", "promoted"), [(5, False), (6, True)])
def test_few_examples_decide_nothing(count, promoted):
    tasks = ("vt",) * count
    old = champion(tasks=tasks)
    decision = decide(0.9 * old, old, tasks=tasks)
    assert decision.promoted is promoted
    assert promoted or decision.reason == "5 examples are too few: at 95% it takes at least 6"
    assert decision.difference.n == count


def test_a_lower_confidence_takes_fewer_examples():
    tasks = ("vt",) * 5
    old = champion(tasks=tasks)
    assert decide(0.9 * old, old, tasks=tasks, confidence=0.9).promoted


def test_a_task_of_one_example_decides_nothing():
    tasks = ("vt",) * 7 + ("cwe",)
    old = champion(tasks=tasks)
    decision = decide(0.9 * old, old, tasks=tasks)
    assert not decision.promoted
    assert "a task has one example" in decision.reason


@given(st.integers(min_value=0, max_value=2**32 - 1), st.floats(min_value=-0.5, max_value=0.5))
def test_of_two_at_most_one_beats_the_other(seed, shift):
    generator = np.random.default_rng(seed)
    old = generator.uniform(0.5, 2, size=(len(TASKS), 2))
    new = np.maximum(old + shift + 0.3 * generator.normal(size=old.shape), 0.0)
    there, back = decide(new, old, num_resamples=100), decide(old, new, num_resamples=100)
    assert not (there.promoted and back.promoted)
    assert there.difference.mean == pytest.approx(-back.difference.mean, abs=1e-9)
    if there.promoted:
        assert back.reason.startswith("worse: ")


def test_what_was_not_judged_alike_is_refused():
    old = scores(champion())
    config, bootstrap = PromoteConfig(), Bootstrap(**BOOTSTRAP)
    with pytest.raises(InputError, match="16 and 14 scores, 14 in common"):
        decide_promotion(old, [score for score in old if score.sample_id != "sample-3"], config, bootstrap)
    with pytest.raises(InputError, match="16 and 8 scores, 8 in common"):
        decide_promotion(old, [score for score in old if score.budget != 128], config, bootstrap)
    with pytest.raises(InputError, match="expected kl once for each example and budget"):
        decide_promotion([*old, *old], old, config, bootstrap)
    with pytest.raises(InputError, match="0 and 0 scores"):
        decide_promotion([], [], config, bootstrap)


@pytest.mark.parametrize("margin", [-0.1, float("nan"), float("inf")])
def test_a_margin_is_a_share(margin):
    with pytest.raises(InputError, match="PromoteConfig: margin is "):
        PromoteConfig(margin=margin)
