"""Fidelity against KL divergences worked out by hand."""

import math

import pytest
import torch

from kvpolicy.inference.likelihood import kl_divergence, token_log_likelihoods


def test_divergence_of_two_tokens_by_hand():
    # KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 log(3/2) + 1/4 log(1/2); logits may have any common offset.
    full = torch.tensor([[3.0, 1.0]]).log() + 5
    compacted = torch.tensor([[[7.0, 7.0]], [[math.log(3), 0.0]], [[0.0, math.log(3)]]])
    found = kl_divergence(full, compacted)
    expected = [
        0.75 * math.log(1.5) + 0.25 * math.log(0.5),
        0.0,
        0.75 * math.log(3) + 0.25 * math.log(1 / 3),
    ]
    assert found[:, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_it_is_from_the_full_distribution_and_not_to_it():
    sharp, flat = torch.tensor([[9.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert kl_divergence(sharp, flat[None]).item() == pytest.approx(math.log(2), abs=0.01)
    assert kl_divergence(flat, sharp[None]).item() > 3


def test_half_precision_logits_are_compared_in_float32():
    generator = torch.Generator().manual_seed(0)
    full = (torch.randn(4, 1_000, generator=generator) * 3).bfloat16()
    compacted = (torch.randn(2, 4, 1_000, generator=generator) * 3).bfloat16()
    found = kl_divergence(full, compacted)
    assert found.dtype == torch.float32
    p, q = full.double().softmax(-1), compacted.double().softmax(-1)
    torch.testing.assert_close(found.double(), (p * (p.log() - q.log())).sum(-1), atol=1e-4, rtol=1e-4)


def test_it_is_never_negative():
    full = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 10
    assert (kl_divergence(full, full[None]) == 0).all()
    assert (kl_divergence(full, (full + 1e-4)[None]) >= 0).all()


def test_likelihoods_of_tokens_are_minus_the_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    logits, token_ids = torch.randn(3, 5, 40, generator=generator).bfloat16(), torch.tensor([3, 0, 39, 7, 7])
    found = token_log_likelihoods(logits, token_ids)
    for row in range(3):
        expected = -torch.nn.functional.cross_entropy(logits[row].float(), token_ids, reduction="none")
        torch.testing.assert_close(found[row], expected)
