"""Soft ranks against the definition: isotonic regression by its minimax formula, projection by all n! orders."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.objectives.soft_rank import nonincreasing_fit, soft_rank_loss, soft_ranks

rows = st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=12)


def _minimax_fit(row):
    """Closed form of the nonincreasing regression: the least over starts of the largest mean from there to an end."""
    n = len(row)
    return [min(max(sum(row[j : k + 1]) / (k + 1 - j) for k in range(i, n)) for j in range(i + 1)) for i in range(n)]


@given(rows)
def test_the_fit_is_the_minimax_formula(row):
    found = nonincreasing_fit(torch.tensor(row, dtype=torch.float64))
    assert found.tolist() == pytest.approx(_minimax_fit(row), abs=1e-9)


def test_rows_of_a_batch_are_fitted_alone():
    batch = torch.randn(3, 4, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = nonincreasing_fit(batch)
    for place in itertools.product(range(3), range(4)):
        torch.testing.assert_close(found[place], nonincreasing_fit(batch[place]))


def test_a_fit_is_nonincreasing_keeps_the_mean_and_needs_no_second():
    values = torch.randn(5, 500, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(dim=-1)
    found = nonincreasing_fit(values)
    assert (found.diff(dim=-1) <= 1e-9).all()
    torch.testing.assert_close(found.mean(dim=-1), values.mean(dim=-1))
    torch.testing.assert_close(nonincreasing_fit(found), found)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("strength", [0.5, 4.0, 100.0])
def test_soft_ranks_are_the_projection_onto_the_hull_of_all_orders(num_tokens, strength):
    # A point p of a convex set is the projection of z if and only if <z - p, q - p> <= 0 for every q of the set.
    generator = torch.Generator().manual_seed(num_tokens)
    for _ in range(20):
        scores = torch.randn(num_tokens, generator=generator, dtype=torch.float64) * 3
        found = soft_ranks(scores, strength=strength)
        away = -scores * num_tokens / strength - found
        for order in itertools.permutations(range(1, num_tokens + 1)):
            assert away @ (torch.tensor(order).to(found) - found) <= 1e-9
        # It is in the set: no k entries are below what the k best ranks add up to.
        ascending = found.sort().values.cumsum(0)
        assert (ascending >= torch.arange(1.0, num_tokens + 1, dtype=torch.float64).cumsum(0) - 1e-9).all()
        assert found.sum().item() == pytest.approx(num_tokens * (num_tokens + 1) / 2)


def test_weak_regularisation_gives_hard_ranks():
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    hard = scores.argsort(dim=-1, descending=True).argsort(dim=-1) + 1
    torch.testing.assert_close(soft_ranks(scores, strength=1e-4), hard.to(scores))


def test_strong_regularisation_gives_ranks_that_are_linear_in_the_scores():
    scores = torch.randn(50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = 25.5 - (scores - scores.mean()) * 50 / 1_000
    torch.testing.assert_close(soft_ranks(scores, strength=1_000.0), expected)


def test_padding_comes_after_and_changes_no_rank():
    scores = torch.randn(3, 20, generator=torch.Generator().manual_seed(4))
    mask = torch.arange(20) < torch.tensor([20, 13, 1])[:, None]
    found = soft_ranks(scores, mask)
    for row, length in enumerate((20, 13, 1)):
        torch.testing.assert_close(found[row, :length], soft_ranks(scores[row, :length]), atol=1e-4, rtol=1e-5)
        assert (found[row, length:] > length).all()


def test_gradients_are_those_of_finite_differences():
    scores = torch.randn(2, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()
    importance = torch.rand(2, 12, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for strength in (0.5, 4.0, 50.0):
        torch.autograd.gradcheck(lambda inputs, s=strength: soft_ranks(inputs, strength=s), scores)
    torch.autograd.gradcheck(lambda inputs: soft_rank_loss(inputs, importance), scores)


def test_long_sequences_in_single_precision():
    scores = torch.randn(2, 4_096, generator=torch.Generator().manual_seed(7))
    single, double = soft_ranks(scores), soft_ranks(scores.double())
    torch.testing.assert_close(single.double(), double, atol=0.1, rtol=1e-4)
