"""Ranks and their correlation, for many rows at once (Spearman, The proof and measurement of association, 1904)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvpolicy.errors import InputError


def average_ranks(values: Float[Tensor, "*batch item"]) -> Float[Tensor, "*batch item"]:
    """Ranks from 1, ascending, in float64; equal values share the average of their ranks.

    Raises:
        InputError: If a value is NaN, which has no rank.
    """
    if num_nan := int(torch.isnan(values).sum()):
        raise InputError(f"ranks: {num_nan} of {values.numel()} values are NaN, expected numbers")
    ascending = values.sort(dim=-1).values
    below = torch.searchsorted(ascending, values.contiguous())
    not_above = torch.searchsorted(ascending, values.contiguous(), right=True)
    return (below + not_above + 1).double() / 2


def normalised_ranks(values: Float[Tensor, "*batch item"]) -> Float[Tensor, "*batch item"]:
    """Average ranks on a scale from 0, the lowest value, to 1, the highest; 0.5 for a single item."""
    num_items = values.shape[-1]
    return (average_ranks(values) - 1) / (num_items - 1) if num_items > 1 else torch.full_like(values, 0.5).double()


def spearman(
    first: Float[Tensor, "*batch item"],
    second: Float[Tensor, "*batch item"],
    *,
    mask: Bool[Tensor, "*batch item"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Spearman's rank correlation of each row: Pearson's, of ranks with ties averaged.

    Args:
        first: One quantity.
        second: Another one of the same items.
        mask: Which items count; all by default.

    Returns:
        From -1 to 1, in float64; NaN where a row has all values of a quantity equal, or fewer than two items, and so
        no order.

    Raises:
        InputError: If a value is NaN.
    """
    counts = torch.ones_like(first, dtype=torch.bool) if mask is None else mask
    centred = []
    for values in (first, second):
        ranks = average_ranks(values.masked_fill(~counts, torch.inf)) * counts  # those left out rank behind all others
        mean = ranks.sum(dim=-1, keepdim=True) / counts.sum(dim=-1, keepdim=True).clamp_min(1)
        centred.append((ranks - mean) * counts)
    a, b = centred
    size = a.square().sum(dim=-1) * b.square().sum(dim=-1)
    correlation = (a * b).sum(dim=-1) / size.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    return torch.where(size > 0, correlation.clamp(-1, 1), torch.nan)
