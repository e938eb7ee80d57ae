"""Eviction cost against its definition: mass lost, summed over all budgets."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.objectives.cost import mask_scores, normalised_cost, optimal_cost, ranking_cost

importances = st.lists(st.floats(0, 10, width=32), min_size=1, max_size=12).filter(lambda row: max(row) > 1e-3)


def _lost_over_all_budgets(ranking, importance):
    """Sum over budgets b of the importance of what b does not keep, by its words."""
    total = 0.0
    for budget in range(len(ranking)):
        total += sum(importance[entry] for entry in ranking[budget:])
    return total


@given(importances, st.integers(0, 1000))
def test_cost_is_the_mass_lost_over_all_budgets(row, seed):
    importance = torch.tensor(row)
    scores = torch.randn(len(row), generator=torch.Generator().manual_seed(seed))
    ranking = scores.argsort(descending=True).tolist()
    expected = _lost_over_all_budgets(ranking, row)
    assert ranking_cost(scores, importance).item() == pytest.approx(expected, rel=1e-4)


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=5))
def test_the_optimal_cost_is_the_least_of_all_rankings(row):
    least = min(_lost_over_all_budgets(ranking, row) for ranking in itertools.permutations(range(len(row))))
    assert optimal_cost(torch.tensor(row)).item() == pytest.approx(least, rel=1e-4, abs=1e-6)


@given(importances)
def test_ranking_by_importance_is_optimal_and_costs_one(row):
    importance = torch.tensor(row)
    assert ranking_cost(importance, importance).item() == pytest.approx(optimal_cost(importance).item(), rel=1e-5)
    assert normalised_cost(importance, importance).item() == pytest.approx(1.0, rel=1e-5)


@given(importances, st.integers(0, 1000))
def test_no_ranking_is_cheaper_than_one(row, seed):
    scores = torch.randn(len(row), generator=torch.Generator().manual_seed(seed))
    assert normalised_cost(scores, torch.tensor(row)).item() >= 1 - 1e-5


def test_where_nothing_is_attended_every_ranking_is_perfect():
    # 0, or a huge number, would pull a mean over sequences where no ranking could.
    importance = torch.stack([torch.zeros(5), torch.arange(5.0)])
    costs = normalised_cost(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), importance)
    assert costs[0] == 1.0
    assert costs[1] >= 1.0


def test_ties_rank_in_order_of_position():
    importance = torch.tensor([1.0, 2.0, 3.0])
    assert ranking_cost(torch.zeros(3), importance).item() == 1 + 4 + 9


def test_padding_costs_nothing():
    generator = torch.Generator().manual_seed(0)
    scores, importance = torch.randn(3, 9, generator=generator), torch.rand(3, 9, generator=generator)
    padded_scores = torch.cat([scores, torch.full((3, 4), 100.0)], dim=1)
    padded_importance = torch.cat([importance, torch.zeros(3, 4)], dim=1)
    mask = torch.arange(13).expand(3, -1) < 9
    masked = mask_scores(padded_scores, mask)
    torch.testing.assert_close(ranking_cost(masked, padded_importance), ranking_cost(scores, importance))
    torch.testing.assert_close(optimal_cost(padded_importance), optimal_cost(importance))
    torch.testing.assert_close(normalised_cost(masked, padded_importance), normalised_cost(scores, importance))
    assert mask_scores(scores, None) is scores
