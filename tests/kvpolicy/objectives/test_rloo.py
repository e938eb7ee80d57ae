"""The sampled estimator: its distribution against all n! rankings, its mean gradient against the exact one."""

import itertools
import math

import pytest
import torch

from kvpolicy.objectives.cost import optimal_cost
from kvpolicy.objectives.exact import expected_ranks
from kvpolicy.objectives.rloo import log_probability, rloo_loss, sample_rankings


def _draw(num_tokens, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_tokens, generator=generator, dtype=dtype)
    return scores, torch.rand(num_tokens, generator=generator, dtype=dtype) ** 3


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6])
def test_probabilities_of_all_rankings_are_right_and_sum_to_one(num_tokens):
    scores, _ = _draw(num_tokens, seed=num_tokens, dtype=torch.float64)
    rankings = torch.tensor(list(itertools.permutations(range(num_tokens))))
    found = log_probability(scores, rankings).exp()
    strengths = scores.exp()
    for ranking, probability in zip(rankings, found, strict=True):
        expected = 1.0
        for place in range(num_tokens):
            expected *= (strengths[ranking[place]] / strengths[ranking[place:]].sum()).item()
        assert probability.item() == pytest.approx(expected, rel=1e-10)
    assert found.sum().item() == pytest.approx(1.0, rel=1e-10)


def test_rankings_are_drawn_as_often_as_they_are_likely():
    scores = torch.tensor([1.0, 0.0, -0.5, 0.3])
    num = 40_000
    rankings = sample_rankings(scores, num, torch.Generator().manual_seed(0))
    for ranking in itertools.permutations(range(4)):
        wanted = torch.tensor([ranking])
        probability = log_probability(scores, wanted).exp().item()
        share = (rankings == wanted).all(dim=1).float().mean().item()
        assert abs(share - probability) < 5 * math.sqrt(probability / num)


def test_probabilities_are_exact_at_extreme_scores():
    scores = torch.tensor([1_000.0, 0.0, -1_000.0], requires_grad=True)
    likely, impossible = log_probability(scores, torch.tensor([[0, 1, 2], [2, 1, 0]]))
    assert likely.item() == pytest.approx(0.0, abs=1e-6)
    assert impossible.item() == pytest.approx(-3_000.0)
    (gradient,) = torch.autograd.grad(impossible, scores)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("num_rankings", [2, 8])
def test_the_mean_gradient_of_20_000_draws_is_the_exact_one(num_rankings):
    scores, importance = _draw(24)
    scores.requires_grad_(True)
    cost = (importance * expected_ranks(scores)).sum() / optimal_cost(importance)
    (exact,) = torch.autograd.grad(cost, scores)

    copies = 20_000 // num_rankings  # as many sequences, so that each has its own leave-one-out baseline
    loss = rloo_loss(
        scores.expand(copies, -1),
        importance.expand(copies, -1),
        num_rankings=num_rankings,
        generator=torch.Generator().manual_seed(0),
        normalise=False,
    )
    (sampled,) = torch.autograd.grad(loss.mean(), scores)
    assert torch.cosine_similarity(sampled, exact, dim=0) >= 0.99
    assert sampled.norm().item() == pytest.approx(exact.norm().item(), rel=0.1)
    assert (sampled - exact).norm() < 0.15 * exact.norm()


def test_normalised_advantages_keep_the_direction():
    scores, importance = _draw(24, seed=4)
    scores.requires_grad_(True)
    (exact,) = torch.autograd.grad((importance * expected_ranks(scores)).sum(), scores)
    loss = rloo_loss(
        scores.expand(2_500, -1),
        importance.expand(2_500, -1),
        num_rankings=8,
        generator=torch.Generator().manual_seed(0),
    )
    (sampled,) = torch.autograd.grad(loss.mean(), scores)
    assert torch.cosine_similarity(sampled, exact, dim=0) >= 0.98


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("num_rankings", [2, 3, 8])
def test_advantages_sum_to_zero(num_rankings, normalise):
    # With equal scores all rankings are equally likely, so the loss is the sum of the advantages times one number.
    importance = torch.rand(5, 12, generator=torch.Generator().manual_seed(0))
    loss = rloo_loss(
        torch.zeros(5, 12),
        importance,
        num_rankings=num_rankings,
        generator=torch.Generator().manual_seed(1),
        normalise=normalise,
    )
    torch.testing.assert_close(loss, torch.zeros(5), atol=1e-4, rtol=0)


def test_the_baseline_leaves_a_ranking_out_of_its_own():
    # Two rankings: the advantage of each is the difference of the costs, by hand.
    scores = torch.tensor([0.4, -0.2, 0.1], requires_grad=True)
    importance = torch.tensor([0.1, 0.7, 0.2])
    rankings = sample_rankings(scores, 2, torch.Generator().manual_seed(3))
    ranks = torch.tensor([1.0, 2.0, 3.0])
    costs = [(importance[ranking] * ranks).sum() / optimal_cost(importance) for ranking in rankings]
    logs = log_probability(scores, rankings)
    by_hand = ((costs[0] - costs[1]) * logs[0] + (costs[1] - costs[0]) * logs[1]) / 2
    assert costs[0] != costs[1]
    loss = rloo_loss(scores, importance, num_rankings=2, generator=torch.Generator().manual_seed(3), normalise=False)
    torch.testing.assert_close(loss, by_hand)


def test_rankings_of_one_cost_give_no_gradient():
    scores = torch.randn(6, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    loss = rloo_loss(scores, torch.zeros(6), num_rankings=4, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(loss, scores)
    assert (gradient == 0).all()


def test_padding_comes_last_and_changes_no_probability():
    scores, _ = _draw(6)
    padded = torch.cat([scores, torch.tensor([50.0, -50.0])])
    mask = torch.arange(8) < 6
    rankings = sample_rankings(padded.masked_fill(~mask, -torch.inf), 50, torch.Generator().manual_seed(0))
    assert (rankings[:, 6:] >= 6).all()
    torch.testing.assert_close(log_probability(padded, rankings, mask), log_probability(scores, rankings[:, :6]))


def test_a_padded_sequence_has_the_gradient_of_the_sequence_alone():
    scores, importance = _draw(10, seed=2)
    scores.requires_grad_(True)
    mask = torch.arange(14) < 10
    copies, gradients = 4_000, []
    for padding in (0, 4):
        loss = rloo_loss(
            torch.cat([scores, torch.full((padding,), 9.0)]).expand(copies, -1),
            torch.cat([importance, torch.zeros(padding)]).expand(copies, -1),
            mask[: 10 + padding].expand(copies, -1),
            num_rankings=4,
            generator=torch.Generator().manual_seed(padding),
            normalise=False,
        )
        gradients.append(torch.autograd.grad(loss.mean(), scores)[0])
    assert gradients[1].isfinite().all()
    assert (gradients[0] - gradients[1]).norm() < 0.1 * gradients[0].norm()


def test_a_seed_gives_the_same_draws():
    scores, _ = _draw(20)
    first, second, third = (sample_rankings(scores, 3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_one_ranking_is_refused(fails_in_one_line):
    message = fails_in_one_line(rloo_loss, torch.zeros(3), torch.ones(3), num_rankings=1, generator=torch.Generator())
    assert "num_rankings is 1" in message
