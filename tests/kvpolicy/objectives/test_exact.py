"""The closed form against all n! rankings, and the binned form against the closed one."""

import itertools
import math

import pytest
import torch

import kvpolicy.objectives.exact as module
from kvpolicy.objectives.cost import optimal_cost
from kvpolicy.objectives.exact import binned_rank_error_bound, exact_loss, expected_ranks, expected_ranks_binned


def _all_rankings(scores):
    """Every ranking with its Plackett-Luce probability, chosen one after the other from those that remain."""
    for ranking in itertools.permutations(range(len(scores))):
        probability = torch.ones((), dtype=scores.dtype)
        for place in range(len(ranking)):
            remaining = scores[list(ranking[place:])].softmax(0)
            probability = probability * remaining[0]
        yield ranking, probability


def _draw(num_tokens, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_tokens, generator=generator, dtype=torch.float64) * scale
    return scores, torch.rand(num_tokens, generator=generator, dtype=torch.float64) ** 3


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6])
def test_expected_ranks_are_the_mean_over_all_rankings(num_tokens):
    scores, _ = _draw(num_tokens, seed=num_tokens)
    mean, total = torch.zeros(num_tokens, dtype=torch.float64), 0.0
    for ranking, probability in _all_rankings(scores):
        total += probability.item()
        for place, entry in enumerate(ranking):
            mean[entry] += probability * (place + 1)
    assert total == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(expected_ranks(scores), mean, atol=1e-12, rtol=0)


@pytest.mark.parametrize("num_tokens", [2, 3, 4, 5, 6])
def test_expected_cost_and_its_gradient_are_those_over_all_rankings(num_tokens):
    scores, importance = _draw(num_tokens, seed=10 + num_tokens)
    scores.requires_grad_(True)
    brute = sum(
        probability * sum((place + 1) * importance[entry] for place, entry in enumerate(ranking))
        for ranking, probability in _all_rankings(scores)
    )
    closed = (importance * expected_ranks(scores)).sum()
    torch.testing.assert_close(closed, brute, atol=1e-12, rtol=0)
    (of_brute,) = torch.autograd.grad(brute, scores)
    (of_closed,) = torch.autograd.grad(closed, scores)
    torch.testing.assert_close(of_closed, of_brute, atol=1e-12, rtol=0)


def test_ranks_in_blocks_are_ranks_at_once(monkeypatch):
    scores = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(1)) > 0.3
    whole, masked = expected_ranks(scores), expected_ranks(scores, mask)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 4 * 6 * 50 * 7)  # seven rows a block, the last one of one row
    torch.testing.assert_close(expected_ranks(scores), whole)
    torch.testing.assert_close(expected_ranks(scores, mask), masked)


def _distributions(num_tokens):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(num_tokens, generator=generator)
    sides = torch.randint(0, 2, (num_tokens,), generator=generator)
    return {
        "normal": normal,
        "wide": normal * 20,
        "narrow": normal * 1e-3,
        "uniform": torch.rand(num_tokens, generator=generator) * 10,
        "heavy_tails": normal / (torch.randn(num_tokens, generator=generator).abs() + 0.05),
        "all_equal": torch.full((num_tokens,), 3.0),
        "two_clusters": sides * 30.0 + 0.1 * normal,
        "one_outlier": torch.cat([normal[:-1], torch.tensor([500.0])]),
    }


@pytest.mark.parametrize("name", _distributions(8))
def test_binned_ranks_are_within_their_bound_at_4096(name):
    scores = _distributions(4_096)[name]
    direct = expected_ranks(scores.double())
    error = (expected_ranks_binned(scores).double() - direct).abs().max().item()
    rounding = 4_096 * 1e-6  # of a float32 FFT over counts that add up to 4,096
    assert error <= binned_rank_error_bound(scores).item() + rounding
    grid = max((scores.max() - scores.min()).item() / (module.NUM_GRID_POINTS - 1), 1e-3)
    assert binned_rank_error_bound(scores).item() == pytest.approx(4_096 * grid**2 / (24 * math.sqrt(3)), abs=1e-6)


@pytest.mark.parametrize("name", ["normal", "uniform", "heavy_tails", "two_clusters"])
def test_the_bound_is_of_use_at_ordinary_spreads(name):
    scores = _distributions(4_096)[name]
    scores = scores / scores.abs().max() * 15  # 30 from end to end
    assert binned_rank_error_bound(scores).item() < 0.1


def test_more_grid_points_are_closer():
    scores = _distributions(4_096)["wide"]
    direct = expected_ranks(scores.double())
    errors = [
        (expected_ranks_binned(scores, num_grid_points=points).double() - direct).abs().max().item()
        for points in (64, 256, 1_024)
    ]
    assert errors[0] > 4 * errors[1] > 16 * errors[2]


@pytest.mark.parametrize("name", ["normal", "wide", "narrow", "uniform", "heavy_tails", "all_equal", "two_clusters"])
def test_binned_gradients_are_close_to_direct_ones(name):
    scores = _distributions(4_096)[name].requires_grad_(True)
    importance = torch.rand(4_096, generator=torch.Generator().manual_seed(2)) ** 4
    (direct,) = torch.autograd.grad((importance * expected_ranks(scores)).sum(), scores)
    (binned,) = torch.autograd.grad((importance * expected_ranks_binned(scores)).sum(), scores)
    assert torch.cosine_similarity(direct, binned, dim=0) > 0.995
    assert (direct - binned).norm() < 0.1 * direct.norm()


def test_equal_scores_have_a_gradient():
    scores = torch.zeros(64, requires_grad=True)
    importance = torch.arange(64.0)
    (gradient,) = torch.autograd.grad(exact_loss(scores, importance), scores)
    assert gradient.isfinite().all()
    assert (gradient[33:] < 0).all() and (gradient[:31] > 0).all()


@pytest.mark.parametrize("ranks", [expected_ranks, expected_ranks_binned])
def test_a_padded_batch_equals_its_sequences_alone(ranks):
    generator = torch.Generator().manual_seed(0)
    lengths = (40, 25, 1)
    scores = torch.randn(2, 3, 40, generator=generator) * 3
    scores[:, 1, 25:], scores[:, 2, 1:] = 1e4, -1e4  # what padding scores must not matter
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    found = ranks(scores, mask.expand(2, -1, -1))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[:, row, :length], ranks(scores[:, row, :length]), atol=1e-3, rtol=1e-4)


def test_a_padded_loss_and_gradient_equal_those_of_the_sequence_alone():
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(30, generator=generator) * 3).requires_grad_(True)
    importance = torch.rand(30, generator=generator)
    alone = exact_loss(scores, importance)
    padded = exact_loss(
        torch.cat([scores, torch.full((11,), 50.0)]),
        torch.cat([importance, torch.zeros(11)]),
        torch.arange(41) < 30,
    )
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)
    (of_alone,) = torch.autograd.grad(alone, scores)
    (of_padded,) = torch.autograd.grad(padded, scores)
    torch.testing.assert_close(of_padded, of_alone, atol=1e-5, rtol=1e-3)


def test_loss_is_zero_for_a_sure_and_perfect_policy_and_never_below():
    importance = torch.rand(4, 50, generator=torch.Generator().manual_seed(0))
    sure = importance.argsort(dim=1).argsort(dim=1) * 30.0
    assert (exact_loss(sure, importance).abs() < 1e-3).all()
    for seed in range(5):
        scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed)) * 10**seed
        assert (exact_loss(scores, importance) > -1e-3).all()


def test_loss_of_equal_scores_is_the_middle_rank():
    importance = torch.rand(50, generator=torch.Generator().manual_seed(0))
    expected = (importance.sum() * 25.5 / optimal_cost(importance)).log()
    torch.testing.assert_close(exact_loss(torch.zeros(50), importance), expected, atol=1e-4, rtol=1e-4)


def test_a_sequence_that_nothing_attends_to_has_neither_loss_nor_gradient():
    scores = torch.randn(2, 20, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    importance = torch.stack([torch.zeros(20), torch.rand(20, generator=torch.Generator().manual_seed(1))])
    loss = exact_loss(scores, importance)
    assert loss[0] == 0.0
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert (gradient[0] == 0).all() and gradient[1].abs().sum() > 0


def test_the_logs_gradient_points_where_the_costs_does():
    scores, importance = (part.float() for part in _draw(60, seed=3))
    scores.requires_grad_(True)
    (of_loss,) = torch.autograd.grad(exact_loss(scores, importance), scores)
    cost = (importance * expected_ranks(scores)).sum()
    (of_cost,) = torch.autograd.grad(cost, scores)
    assert torch.cosine_similarity(of_loss, of_cost, dim=0) > 0.999
    torch.testing.assert_close(of_loss, of_cost / cost.detach(), atol=1e-4, rtol=2e-2)
