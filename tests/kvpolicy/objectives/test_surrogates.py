"""The supervised surrogates against naive loops in float64, against finite differences, and with padding."""

import itertools
import math

import pytest
import torch

from kvpolicy.objectives.listwise import listwise_loss
from kvpolicy.objectives.pairwise import pairwise_loss
from kvpolicy.objectives.registry import OBJECTIVES, make_objective
from kvpolicy.objectives.regression import LEAST_SHARE, log_mse_loss, mse_loss

SURROGATES = [name for name in OBJECTIVES.own_names if name not in ("exact", "rloo")]


def _objective(name, seed=0):
    return make_objective(name, num_rankings=4, generator=torch.Generator().manual_seed(seed))


def _draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return scores, torch.rand(*shape, generator=generator, dtype=torch.float64) ** 6


def _standardised(row):
    mean = sum(row) / len(row)
    deviation = math.sqrt(sum((entry - mean) ** 2 for entry in row) / len(row))
    return [(entry - mean) / deviation for entry in row]


def _naive_mse(scores, importance):
    pairs = zip(scores, _standardised(importance), strict=True)
    return sum((score - target) ** 2 for score, target in pairs) / len(scores)


def _naive_log_mse(scores, importance):
    least = LEAST_SHARE * sum(importance) / len(importance)
    return _naive_mse(
        scores, [math.log(max(entry, least)) if entry < least else math.log(entry) for entry in importance]
    )


def _naive_pairwise(scores, importance):
    losses = [
        math.log(1 + math.exp(scores[lower] - scores[higher]))
        for higher, lower in itertools.permutations(range(len(scores)), 2)
        if importance[higher] > importance[lower]
    ]
    return sum(losses) / len(losses)


def _naive_listwise(scores, importance):
    total, strength = sum(importance), sum(math.exp(score) for score in scores)
    shares = [entry / total for entry in importance]
    return sum(
        share * (math.log(share) - math.log(math.exp(score) / strength))
        for share, score in zip(shares, scores, strict=True)
        if share > 0
    )


@pytest.mark.parametrize(
    ("loss", "naive"),
    [
        (mse_loss, _naive_mse),
        (log_mse_loss, _naive_log_mse),
        (listwise_loss, _naive_listwise),
        (
            lambda scores, importance: pairwise_loss(
                scores, importance, generator=torch.Generator(), num_partners=scores.shape[-1]
            ),
            _naive_pairwise,
        ),
    ],
    ids=["mse", "log_mse", "listwise", "pairwise"],
)
def test_losses_are_those_of_naive_loops(loss, naive):
    scores, importance = _draw(2, 3, 12)
    importance[0, 0, 3:5] = 0.0  # nothing, and a pair of equals
    found = loss(scores, importance)
    for batch in itertools.product(range(2), range(3)):
        assert found[batch].item() == pytest.approx(naive(scores[batch].tolist(), importance[batch].tolist()), rel=1e-9)


def test_a_sample_of_pairs_has_the_mean_of_all():
    scores, importance = _draw(30, seed=1)
    copies, generator = 600, torch.Generator().manual_seed(0)
    samples = torch.stack(
        [pairwise_loss(scores, importance, generator=generator, num_partners=3) for _ in range(copies)]
    )
    everything = pairwise_loss(scores, importance, generator=generator, num_partners=29)
    assert samples.std() > 0
    assert (samples.mean() - everything).abs() < 4 * samples.std() / math.sqrt(copies)


@pytest.mark.parametrize("name", SURROGATES)
def test_gradients_are_those_of_finite_differences(name):
    scores, importance = _draw(2, 9, seed=2)
    mask = torch.arange(9) < torch.tensor([9, 6])[:, None]
    importance = importance * mask
    torch.autograd.gradcheck(lambda inputs: _objective(name)(inputs, importance, mask), scores.requires_grad_())


@pytest.mark.parametrize("name", OBJECTIVES.own_names)
def test_no_objective_has_a_gradient_on_padding_or_is_moved_by_it(name):
    scores, importance = _draw(3, 14, seed=3)
    mask = torch.arange(14) < torch.tensor([14, 9, 1])[:, None]
    importance = importance * mask
    scores.requires_grad_()
    (gradient,) = torch.autograd.grad(_objective(name)(scores, importance, mask).sum(), scores)
    assert gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()
    other = torch.where(mask, scores, 40.0)
    torch.testing.assert_close(_objective(name)(other, importance, mask), _objective(name)(scores, importance, mask))


@pytest.mark.parametrize(
    "name", [name for name in SURROGATES if name != "pairwise"]
)  # of which another sample is drawn
def test_a_padded_sequence_has_the_loss_of_the_sequence_alone(name):
    scores, importance = _draw(11, seed=4)
    mask = torch.arange(15) < 11
    padded = torch.cat([scores, torch.full((4,), 3.0, dtype=torch.float64)])
    found = _objective(name)(padded, torch.cat([importance, torch.zeros(4, dtype=torch.float64)]), mask)
    torch.testing.assert_close(found, _objective(name)(scores, importance))


@pytest.mark.parametrize("name", OBJECTIVES.own_names)
def test_where_nothing_is_attended_there_is_no_gradient(name):
    scores, importance = _draw(2, 10, seed=5)
    importance[0] = 0.0
    scores.requires_grad_()
    loss = _objective(name)(scores, importance)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert loss.isfinite().all()
    assert (gradient[0] == 0).all() and (gradient[1] != 0).any()


@pytest.mark.parametrize("name", SURROGATES)
def test_the_scale_of_importance_does_not_matter(name):
    scores, importance = _draw(2, 20, seed=6)
    torch.testing.assert_close(_objective(name)(scores, importance * 1e-3), _objective(name)(scores, importance))


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("mse", lambda row: (row - row.mean()) / row.std(correction=0)),
        ("log_mse", lambda row: (row.log() - row.log().mean()) / row.log().std(correction=0)),
        ("listwise", lambda row: row.log()),
        ("pairwise", lambda row: row.argsort().argsort().to(row) * 50),
        ("soft_rank", lambda row: row.argsort().argsort().to(row) * 50),
    ],
)
def test_the_best_scores_have_no_loss(name, best):
    importance = _draw(20, seed=7)[1] + 1e-2
    perfect = _objective(name)(best(importance), importance)
    assert perfect.item() == pytest.approx(0.0, abs=1e-9)
    assert _objective(name)(best(importance).flip(0), importance) > 0.1


def test_scores_of_nothing_leave_all_variance_unexplained():
    importance = _draw(3, 20, seed=8)[1]
    for loss in (mse_loss, log_mse_loss):
        torch.testing.assert_close(loss(torch.zeros_like(importance), importance), torch.ones(3, dtype=torch.float64))


def test_one_token_has_nothing_to_learn():
    # In float64: the rounding of a float32 FFT, divided by the grid's spacing, is 1e-4 on some processors.
    scores = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    importance = torch.tensor([[0.5]], dtype=torch.float64)
    for name in OBJECTIVES.own_names:
        (gradient,) = torch.autograd.grad(_objective(name)(scores, importance).sum(), scores)
        assert gradient.abs().max() < 1e-9, name
