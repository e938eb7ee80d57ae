"""Ranks and correlations against their definitions, taken literally."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.analysis.ranks import average_ranks, normalised_ranks, spearman

# Few values, so that there are ties.
ROWS = st.lists(st.integers(0, 5), min_size=1, max_size=12)
PAIRS = st.integers(1, 12).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(0, 5), min_size=size, max_size=size) for _ in range(3)])
)


def _ranks(values):
    """How many are below, and half of the others that are equal, counted from 1."""
    return [1 + sum(v < own for v in values) + (sum(v == own for v in values) - 1) / 2 for own in values]


@given(ROWS)
def test_ranks_are_those_of_counting(values):
    assert average_ranks(torch.tensor(values, dtype=torch.float32)).tolist() == _ranks(values)


@given(PAIRS)
def test_correlation_is_pearsons_of_ranks_of_what_counts(rows):
    first, second, counts = rows
    mask = torch.tensor(counts) > 2
    found = spearman(torch.tensor(first).float(), torch.tensor(second).float(), mask=mask)
    a, b = (np.array(_ranks([v for v, own in zip(row, mask, strict=True) if own])) for row in (first, second))
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        assert found.isnan()
    else:
        assert found.item() == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-9)


def test_rows_of_a_batch_are_correlated_each_by_itself():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(3, 4, 50, generator=generator) for _ in range(2))
    found = spearman(first, second)
    assert found.shape == (3, 4)
    for i, j in np.ndindex(3, 4):
        assert found[i, j].item() == pytest.approx(spearman(first[i, j], second[i, j]).item())


def test_any_rising_function_leaves_the_correlation():
    values, other = torch.randn(40, generator=torch.Generator().manual_seed(0)), torch.arange(40.0)
    assert spearman(values, values.exp()).item() == pytest.approx(1.0)
    assert spearman(values, -values).item() == pytest.approx(-1.0)
    assert spearman(values, other).item() == spearman(3 * values + 7, other**3).item()


def test_normalised_ranks_go_from_0_to_1():
    assert normalised_ranks(torch.tensor([3.0, 1.0, 2.0, 9.0, 2.0])).tolist() == [0.75, 0.0, 0.375, 1.0, 0.375]
    assert normalised_ranks(torch.tensor([[7.0]])).tolist() == [[0.5]]


def test_nan_has_no_rank(fails_in_one_line):
    assert "1 of 2 values are NaN" in fails_in_one_line(average_ranks, torch.tensor([1.0, torch.nan]))
