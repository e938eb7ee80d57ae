"""The shape of heads against power laws, uniform distributions and permutations, whose figures are known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.analysis.heads import effective_tokens, head_shapes, zipf_slope
from kvpolicy.analysis.ranks import spearman


def _shuffled(values, seed):
    order = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)).argsort()
    return values[order]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("num_tokens", [2, 30, 3_000])
def test_the_slope_of_an_exact_power_law_is_its_exponent(exponent, num_tokens):
    law = torch.arange(1, num_tokens + 1).double() ** -exponent
    scaled = torch.stack([_shuffled(law, 0), 1e-6 * _shuffled(law, 1)])
    assert zipf_slope(scaled).tolist() == pytest.approx([exponent] * 2, abs=1e-6)


def test_the_slope_ignores_what_lies_behind_99_percent():
    law = torch.arange(1, 51).double() ** -1.0
    crowd = torch.full((1_000,), 1e-9, dtype=torch.float64)  # negligible, and 20 times as many
    head = torch.cat([law, crowd])[None]
    kept = int((law.cumsum(0) < 0.99 * head.sum()).sum()) + 1
    x, y = np.log(np.arange(1, kept + 1)), np.log(law[:kept].numpy())
    assert zipf_slope(head).item() == pytest.approx(-np.polyfit(x, y, 1)[0])
    assert zipf_slope(head).item() == pytest.approx(1.0, abs=1e-6)
    assert zipf_slope(head, mass=1.0).item() > 2


def test_the_slope_is_the_least_squares_line():
    head = torch.rand(1, 40, generator=torch.Generator().manual_seed(0)) + 0.01
    y = np.log(np.sort(head[0].double().numpy())[::-1])
    kept = int((np.exp(y).cumsum() < 0.99 * np.exp(y).sum()).sum()) + 1
    assert zipf_slope(head).item() == pytest.approx(-np.polyfit(np.log(np.arange(1, kept + 1)), y[:kept], 1)[0])


def test_a_head_with_one_token_or_none_has_no_slope():
    heads = torch.tensor([[1.0, 0.0, 0.0], [0.995, 0.005, 0.0], [0.0, 0.0, 0.0]])
    assert zipf_slope(heads).isnan().all()


@pytest.mark.parametrize("num_equal", [1, 7, 50])
def test_equal_tokens_count_fully(num_equal):
    head = torch.zeros(1, 50)
    head[0, :num_equal] = 0.3
    assert effective_tokens(head).item() == pytest.approx(num_equal)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 10))
def test_effective_tokens_are_between_one_and_all_and_know_no_scale(seed, scale):
    head = torch.rand(3, 25, generator=torch.Generator().manual_seed(seed)) ** 5
    found = effective_tokens(head)
    assert ((found >= 1) & (found <= 25 + 1e-9)).all()
    torch.testing.assert_close(effective_tokens(head * scale), found, rtol=1e-4, atol=0)
    share = (head / head.sum(1, keepdim=True)).double().clamp_min(1e-300)
    torch.testing.assert_close(found, (-(share * share.log()).sum(1)).exp(), rtol=1e-5, atol=0)


def test_a_head_that_receives_nothing_is_spread_over_all():
    assert effective_tokens(torch.zeros(1, 8)).tolist() == pytest.approx([8.0])


def test_heads_that_rank_alike_do_not_deviate():
    head = torch.rand(30, generator=torch.Generator().manual_seed(0))
    shapes = head_shapes([torch.stack([head, head.exp(), 5 * head])])
    assert shapes.rank_variance == pytest.approx(0, abs=1e-30)
    torch.testing.assert_close(shapes.rank_correlation, torch.ones(3, 3).double())


def test_opposite_heads_deviate_most():
    head = torch.arange(3.0)
    shapes = head_shapes([torch.stack([head, -head])])
    # Ranks 0, 1/2, 1 and 1, 1/2, 0; mean 1/2: squared distances 1/4, 0, 1/4 in each head.
    assert shapes.rank_deviation.tolist() == pytest.approx([1 / 6, 1 / 6])
    assert shapes.rank_correlation.tolist() == [pytest.approx([1, -1]), pytest.approx([-1, 1])]


def test_rank_variance_is_that_of_each_token_over_heads():
    generator = torch.Generator().manual_seed(0)
    samples = [torch.rand(6, size, generator=generator) for size in (40, 25)]
    shapes = head_shapes(samples)
    by_token = []
    for importance in samples:
        ranks = importance.argsort(1).argsort(1).double() / (importance.shape[1] - 1)
        by_token.append(ranks.numpy().var(axis=0).mean())
    assert shapes.rank_variance == pytest.approx(np.mean(by_token))
    assert shapes.num_samples == 2


def test_heads_that_rank_at_random_deviate_by_a_twelfth():
    shapes = head_shapes([torch.rand(60, 2_000, generator=torch.Generator().manual_seed(0))])
    assert shapes.rank_variance == pytest.approx(1 / 12, rel=0.03)


def test_the_correlation_matrix_is_the_mean_of_the_samples():
    generator = torch.Generator().manual_seed(0)
    samples = [torch.rand(4, size, generator=generator) for size in (30, 50, 20)]
    found = head_shapes(samples).rank_correlation
    for a in range(4):
        for b in range(4):
            expected = sum(spearman(sample[a], sample[b]).item() for sample in samples) / 3
            assert found[a, b].item() == pytest.approx(expected)


def test_a_head_without_an_order_is_left_out_of_means_and_never_counted_as_0():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(3, 20, generator=generator) for _ in range(2))
    second[1] = 0
    found, alone = head_shapes([first, second]), head_shapes([first])
    assert found.rank_correlation[0, 1] == alone.rank_correlation[0, 1]
    assert found.zipf_slope[1] == alone.zipf_slope[1]
    assert head_shapes([second]).rank_correlation[1].isnan().all()
    assert math.isnan(head_shapes([second]).zipf_slope[1])


def test_no_samples_are_refused(fails_in_one_line):
    assert "at least one" in fails_in_one_line(head_shapes, [])
