"""The one place that selects: order, always-kept tokens, nesting and rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.errors import InputError
from kvpolicy.methods.ranking import (
    NOT_KEPT,
    budget_from_ratio,
    check_allocation,
    kept_positions,
    rank_by_score,
    retention_ranks,
)

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


@given(tied_scores, st.data())
@settings(deadline=None)
def test_a_budget_keeps_the_ranks_up_to_it(scores, data):
    sinks, recents = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 14))
    always = {"num_sink_tokens": sinks, "num_recent_tokens": recents}
    both = torch.tensor([scores, scores[::-1]])
    ranks = retention_ranks(both, **always)
    assert ranks.sort(dim=1).values.tolist() == [list(range(1, len(scores) + 1))] * 2
    for budget in range(sinks + recents, len(scores) + 1):
        for row, kept in zip(ranks, kept_positions(both, budget, **always), strict=True):
            assert torch.nonzero(row <= budget).flatten().tolist() == kept.tolist()


def test_the_whole_context_is_a_budget():
    assert kept_positions(torch.randn(2, 30), 30).tolist() == [list(range(30))] * 2


@pytest.mark.parametrize("budget", [-1, 0, 19, 31])
def test_budgets_out_of_range_are_refused(budget):
    with pytest.raises(InputError, match=f"budget: {budget} tokens, expected from 20 .* to 30"):
        kept_positions(torch.zeros(2, 30), budget)


@given(st.data(), st.integers(20, 50))
@settings(deadline=None)
def test_each_head_keeps_what_it_would_keep_alone(data, num_tokens):
    values = st.sampled_from([-1.0, 0.0, 2.0, float("inf")])
    scores = torch.tensor(data.draw(st.lists(st.lists(values, min_size=num_tokens, max_size=num_tokens), min_size=1)))
    budgets = torch.tensor([data.draw(st.integers(20, num_tokens)) for _ in scores])
    kept = kept_positions(scores, budgets)
    assert kept.shape == (len(scores), int(budgets.max()))
    for head, budget in enumerate(budgets.tolist()):
        padding, own = kept[head, : kept.shape[1] - budget], kept[head, kept.shape[1] - budget :]
        assert (padding == NOT_KEPT).all()
        assert torch.equal(own, kept_positions(scores[head : head + 1], budget)[0])


@pytest.mark.parametrize("budgets", [[20, 31], [19, 25]])
def test_a_budget_of_one_head_out_of_range_is_refused(budgets):
    with pytest.raises(InputError, match=r"budget: (31|19) tokens, expected from 20 .* to 30"):
        kept_positions(torch.zeros(2, 30), torch.tensor(budgets))


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        (26, "78 tokens for 3 heads, expected 75 for 3"),
        (torch.tensor([25, 25, 26]), "76 tokens for 3 heads, expected 75 for 3"),
        (torch.tensor([25, 50]), "75 tokens for 2 heads, expected 75 for 3"),
        (torch.tensor([19, 28, 28]), "budget: 19 tokens, expected from 20"),
        (torch.tensor([21, 23, 31]), "budget: 31 tokens, expected from 20 .* to 30"),
    ],
)
def test_an_allocation_that_is_not_the_budget_is_refused(allocation, message):
    with pytest.raises(InputError, match=message) as error:
        check_allocation(allocation, 25, num_heads=3, num_tokens=30)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("allocation", [25, torch.tensor([25, 25, 25]), torch.tensor([20, 25, 30])])
def test_an_allocation_of_the_whole_budget_is_allowed(allocation):
    check_allocation(allocation, 25, num_heads=3, num_tokens=30)


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
