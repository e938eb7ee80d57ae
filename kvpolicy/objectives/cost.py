"""Eviction cost of a ranking: importance lost, summed over all budgets.

For a ranking r (r_1 kept longest), the mass lost at budget b is the sum of imp(r_k) over k > b. Summed over
b = 0 ... n-1 that is exactly the sum of k * imp(r_k). The normalised cost divides by the cost of ranking by importance,
so that 1.0 is perfect.

Legend: H heads, B sequences, T tokens. Padding has importance 0 and is masked out.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

PerToken = Float[Tensor, "*batch token"]
PerSequence = Float[Tensor, "*batch"]
Mask = Bool[Tensor, "*batch token"]
"""True for entries, false for padding."""

# Below this optimal cost a sequence has nothing to lose, and every ranking of it is perfect.
TINY = 1e-12


def optimal_cost(importance: PerToken) -> PerSequence:
    """Cost of the best ranking: importance, descending. Padding of importance 0 adds nothing."""
    descending = importance.sort(dim=-1, descending=True).values
    return (descending * _ranks(importance)).sum(dim=-1)


def ranking_cost(scores: PerToken, importance: PerToken) -> PerSequence:
    """Cost of the ranking that `scores` give (descending, ties in order of position).

    Padding must score -inf, so that it comes last.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return (importance.gather(-1, order) * _ranks(importance)).sum(dim=-1)


def normalised_cost(scores: PerToken, importance: PerToken) -> PerSequence:
    """Cost of a ranking over that of the optimal one: 1.0 is perfect, and nothing is below it."""
    return over_optimal(ranking_cost(scores, importance), importance)


def over_optimal(cost: PerSequence, importance: PerToken) -> PerSequence:
    """A cost over the optimal one; 1, with no gradient, for a sequence in which nothing is attended."""
    optimal = optimal_cost(importance)
    return torch.where(optimal > TINY, cost / optimal.clamp_min(TINY), 1.0)


def mask_scores(scores: PerToken, mask: Mask | None) -> PerToken:
    """Scores with padding at -inf, which puts it last in every ranking."""
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _ranks(importance: Tensor) -> Tensor:
    return torch.arange(1, importance.shape[-1] + 1, device=importance.device, dtype=importance.dtype)
