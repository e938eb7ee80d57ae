"""The soft-rank surrogate: eviction cost with the fast differentiable ranks of Blondel et al. (arXiv 2002.08871).

The soft ranks of scores s are the Euclidean projection of -s / epsilon onto the permutahedron, the convex hull of all
orders of (1, ..., n), with the quadratic regulariser of section 4. By their proposition 3 it takes one sort and one
isotonic regression: with z = -s / epsilon sorted descending and w = (n, ..., 1),

    ranks = z - v,    v = the nonincreasing sequence closest to z - w.

Small epsilon gives hard ranks and gradients that vanish; large epsilon gives ranks linear in the scores. Ranks count
tokens and scores do not, so epsilon is `strength / n`: scores spread evenly over `strength` get hard ranks.

The loss is the log of the normalised cost at these ranks, as in `exact`, whose ranks are expectations instead.

Isotonic regression pools adjacent violators. Here every run of them in every row is pooled in one round of segment
sums, until none is left: O(n) memory, in few rounds on ordinary scores (n in the worst case). The gradient is the
mean over each pool, which the same segment sums give.
"""

import torch
from torch import Tensor

from kvpolicy.objectives.cost import Mask, PerSequence, PerToken, over_optimal

STRENGTH = 4.0


def soft_rank_loss(scores: PerToken, importance: PerToken, mask: Mask | None = None) -> PerSequence:
    """Log of the normalised eviction cost of each sequence at its soft ranks: 0 is perfect.

    Args:
        scores: Scores of the policy.
        importance: Importance of the same entries; 0 for padding.
        mask: True for entries, false for padding.
    """
    return over_optimal((importance * soft_ranks(scores, mask)).sum(dim=-1), importance).log()


def soft_ranks(scores: PerToken, mask: Mask | None = None, *, strength: float = STRENGTH) -> PerToken:
    """Soft ranks: near 1 for the highest score, near the number of entries for the lowest; padding comes after.

    Args:
        scores: Scores of the policy.
        mask: True for entries, false for padding.
        strength: Strength of the regularisation; epsilon is this over the number of entries.
    """
    size = scores.shape[-1]
    num_entries = torch.full_like(scores[..., :1], size) if mask is None else mask.sum(dim=-1, keepdim=True)
    wanted = -scores * (num_entries / strength)
    if mask is not None:
        # Ranks are at most n apart, so padding this far behind forms a pool of its own.
        behind = wanted.detach().masked_fill(~mask, -torch.inf).amax(dim=-1, keepdim=True) + 2 * size
        wanted = torch.where(mask, wanted, behind)
    ordered, order = wanted.sort(dim=-1, descending=True)
    descending = torch.arange(size, 0, -1, device=scores.device, dtype=scores.dtype)
    ranks = ordered - nonincreasing_fit(ordered - descending)
    return torch.empty_like(ranks).scatter(-1, order, ranks)


def nonincreasing_fit(values: PerToken) -> PerToken:
    """The nonincreasing sequence that is closest to each row in squared error (isotonic regression)."""
    detached = values.detach()
    starts = torch.ones_like(values, dtype=torch.bool)
    while True:
        pools = starts.cumsum(dim=-1) - 1
        fit = _pool_means(detached, pools)
        rising = torch.zeros_like(starts)
        rising[..., 1:] = starts[..., 1:] & (fit[..., 1:] > fit[..., :-1])
        if not bool(rising.any()):
            return _pool_means(values, pools)
        starts = starts & ~rising


def _pool_means(values: Tensor, pools: Tensor) -> Tensor:
    sums = torch.zeros_like(values).scatter_add(-1, pools, values)
    sizes = torch.zeros_like(values).scatter_add(-1, pools, torch.ones_like(values))
    return (sums / sizes.clamp_min(1.0)).gather(-1, pools)
