"""The one place that selects: order, always-kept tokens, nesting and rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.errors import InputError
from kvpolicy.ranking import budget_from_ratio, kept_positions, rank_by_score

# Few distinct values, so that ties are the rule.
tied_scores = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("inf"), float("-inf")]), min_size=20, max_size=60)


def test_ranking_is_descending():
    assert rank_by_score(torch.tensor([[0.1, 3.0, -2.0], [5.0, 5.0, 6.0]])).tolist() == [[1, 0, 2], [2, 0, 1]]


@given(tied_scores)
@settings(deadline=None)
def test_ranking_is_a_permutation_with_ties_in_token_order(scores):
    ranking = rank_by_score(torch.tensor(scores)).tolist()
    assert ranking == sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def test_large_ties_are_in_token_order():
    assert torch.equal(rank_by_score(torch.zeros(2, 5000)), torch.arange(5000).expand(2, -1))


def test_nan_is_refused():
    with pytest.raises(InputError, match="1 of 3 are NaN"):
        rank_by_score(torch.tensor([0.0, float("nan"), 1.0]))


@given(tied_scores, st.data())
@settings(deadline=None)
def test_kept_tokens_are_the_sinks_the_recents_and_the_best_between(scores, data):
    num_tokens = len(scores)
    sinks, recents = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 14))
    budget = data.draw(st.integers(sinks + recents, num_tokens))
    both = torch.tensor([scores, scores[::-1]])
    kept = kept_positions(both, budget, num_sink_tokens=sinks, num_recent_tokens=recents)
    assert kept.shape == (2, budget)
    for row, own in zip(kept.tolist(), both.tolist(), strict=True):
        middle = sorted(range(sinks, num_tokens - recents), key=lambda token: (-own[token], token))
        best = middle[: budget - sinks - recents]
        assert row == sorted([*range(sinks), *best, *range(num_tokens - recents, num_tokens)])


@given(tied_scores, st.data())
@settings(deadline=None)
def test_kept_sets_are_nested(scores, data):
    small = data.draw(st.integers(20, len(scores)))
    large = data.draw(st.integers(small, len(scores)))
    few, many = (set(kept_positions(torch.tensor([scores]), budget)[0].tolist()) for budget in (small, large))
    assert few <= many


def test_the_whole_context_is_a_budget():
    assert kept_positions(torch.randn(2, 30), 30).tolist() == [list(range(30))] * 2


@pytest.mark.parametrize("budget", [-1, 0, 19, 31])
def test_budgets_out_of_range_are_refused(budget):
    with pytest.raises(InputError, match=f"budget: {budget} tokens, expected from 20 .* to 30"):
        kept_positions(torch.zeros(2, 30), budget)


def test_negative_always_kept_tokens_are_refused():
    with pytest.raises(InputError, match="-1 first"):
        kept_positions(torch.zeros(2, 30), 25, num_sink_tokens=-1)


@pytest.mark.parametrize(
    ("ratio", "num_tokens", "budget"),
    [
        (0.1, 10, 1),  # int(10 * (1 - 0.9)) is 0
        (1 - 0.9, 10, 1),
        (0.29, 100, 29),  # int(0.29 * 100) is 28
        (0.35, 10, 4),
        (0.45, 10, 5),  # round() would give the even 4
        (0.05, 10, 1),
        (0.049, 10, 0),
        (1.0, 7, 7),
        (0.0, 7, 0),
        (0.125, 4096, 512),
    ],
)
def test_ratios_round_half_up(ratio, num_tokens, budget):
    assert budget_from_ratio(ratio, num_tokens) == budget


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf")])
def test_ratios_out_of_range_are_refused(ratio):
    with pytest.raises(InputError, match="ratio"):
        budget_from_ratio(ratio, 10)


def test_negative_contexts_are_refused():
    with pytest.raises(InputError, match="num_tokens"):
        budget_from_ratio(0.5, -1)
