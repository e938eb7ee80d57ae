"""The expected eviction cost under Plackett-Luce in closed form: the policy gradient without sampling.

The cost is linear in the ranks, and under Plackett-Luce P(j before i) = sigmoid(s_j - s_i) (Luce's choice axiom on
pairs), so

    E[rank_i] = 1 + sum over j != i of sigmoid(s_j - s_i),        E[cost] = sum over i of imp(i) * E[rank_i].

`expected_ranks` evaluates this in O(n^2), a block of rows at a time. `expected_ranks_binned` spreads every score
linearly over its two neighbours on a uniform grid, convolves with the sigmoid by FFT and interpolates back:
O(n + G log G), and differentiable through the interpolation weights.

Error of the binned form: linear interpolation in one variable is off by at most h^2/8 * max|f''|; it is applied to both
scores of each pair, and max|sigmoid''| = 1/(6 sqrt 3), so |error of E[rank_i]| <= n * h^2 / (24 sqrt 3) with grid
spacing h (`binned_rank_error_bound`), besides the float32 rounding of the FFT.

Legend: H heads, B sequences, T tokens, G grid points.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.objectives.cost import Mask, PerSequence, PerToken, over_optimal

NUM_GRID_POINTS = 1024
_BLOCK_BYTES = 64 * 2**20
# The gradient is a difference between grid points, so on a finer grid float32 rounding would drown it; the error of
# this one, 2.4e-8 * n, is below that rounding.
_LEAST_SPACING = 1e-3


def expected_ranks(scores: PerToken, mask: Mask | None = None) -> PerToken:
    """E[rank] of every entry by direct summation over pairs, in blocks of rows; padding takes part in no pair."""
    num_tokens = scores.shape[-1]
    rows = scores.numel() // num_tokens
    block = max(1, _BLOCK_BYTES // (4 * rows * num_tokens))
    blocks = []
    for first in range(0, num_tokens, block):
        block_scores = scores[..., first : first + block]
        before = torch.sigmoid(scores[..., None, :] - block_scores[..., :, None])
        if mask is not None:
            before = before * mask[..., None, :]
        blocks.append(before.sum(dim=-1))
    return torch.cat(blocks, dim=-1) + 0.5  # the pair of an entry with itself adds sigmoid(0) = 1/2


def expected_ranks_binned(
    scores: PerToken,
    mask: Mask | None = None,
    num_grid_points: int = NUM_GRID_POINTS,
) -> PerToken:
    """E[rank] of every entry through a grid of `num_grid_points` over each row's range of scores."""
    weight = torch.ones_like(scores) if mask is None else mask.to(scores.dtype)
    low, spacing = _grid(scores, mask, num_grid_points)
    offset = ((scores - low) / spacing).clamp(0, num_grid_points - 1)
    left = offset.detach().floor().clamp(max=num_grid_points - 2).long()
    fraction = offset - left

    counts = scores.new_zeros(*scores.shape[:-1], num_grid_points)
    counts = counts.scatter_add(-1, left, weight * (1 - fraction))
    counts = counts.scatter_add(-1, left + 1, weight * fraction)

    # ahead[g] = sum over g' of counts[g'] * sigmoid((g' - g) * spacing): a correlation, done as a circular convolution.
    steps = torch.arange(-(num_grid_points - 1), num_grid_points, device=scores.device, dtype=scores.dtype)
    kernel = torch.sigmoid(-steps * spacing)
    length = 4 * num_grid_points
    product = torch.fft.rfft(counts, n=length) * torch.fft.rfft(kernel, n=length)
    ahead = torch.fft.irfft(product, n=length)[..., num_grid_points - 1 : 2 * num_grid_points - 1]

    ranks: Tensor = ahead.gather(-1, left) * (1 - fraction) + ahead.gather(-1, left + 1) * fraction + 0.5
    return ranks


def binned_rank_error_bound(scores: PerToken, num_grid_points: int = NUM_GRID_POINTS) -> Float[Tensor, "*batch 1"]:
    """Largest possible difference between the binned and the direct E[rank] of any entry, per row."""
    _, spacing = _grid(scores, None, num_grid_points)
    return scores.shape[-1] * spacing**2 / (24 * math.sqrt(3))


def exact_loss(scores: PerToken, importance: PerToken, mask: Mask | None = None) -> PerSequence:
    """Log of the expected normalised eviction cost of each sequence: 0 is perfect.

    The log keeps heads whose costs differ by orders of magnitude in balance; it changes the weight of a sequence's
    gradient, not its direction.
    """
    cost = (importance * expected_ranks_binned(scores, mask)).sum(dim=-1)
    return over_optimal(cost, importance).log()


def _grid(scores: Tensor, mask: Tensor | None, num_grid_points: int) -> tuple[Tensor, Tensor]:
    detached = scores.detach()
    high = detached if mask is None else detached.masked_fill(~mask, -torch.inf)
    low = detached if mask is None else detached.masked_fill(~mask, torch.inf)
    lowest, highest = low.amin(dim=-1, keepdim=True), high.amax(dim=-1, keepdim=True)
    return lowest, ((highest - lowest) / (num_grid_points - 1)).clamp_min(_LEAST_SPACING)
