"""The sampled estimator of KV Policy (arXiv 2602.10238): REINFORCE with a leave-one-out baseline over rankings.

Scores define a Plackett-Luce distribution over rankings; adding independent Gumbel(0, 1) noise and sorting draws from
it exactly. K >= 2 rankings are drawn for each sequence; the reward of one is its negative normalised eviction cost, its
baseline the mean reward of the others. The log-probability of a ranking is

    log P(r) = sum over k of ( s_{r_k} - log sum over l >= k of exp(s_{r_l}) ),

whose second term is one reversed log-cumsum-exp.

Legend: K rankings, then any batch dimensions, T tokens.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.errors import InputError
from kvpolicy.objectives.cost import TINY, Mask, PerSequence, PerToken, mask_scores, optimal_cost

MIN_RANKINGS = 2


def sample_rankings(
    scores: PerToken, num_rankings: int, generator: torch.Generator
) -> Int[Tensor, "ranking *batch token"]:
    """Draw rankings from the Plackett-Luce distribution of `scores`; entries scored -inf come last."""
    shape = (num_rankings, *scores.shape)
    exponential = torch.empty(shape, dtype=scores.dtype, device=scores.device).exponential_(generator=generator)
    return (scores.detach() - exponential.clamp_min(TINY).log()).argsort(dim=-1, descending=True)


def log_probability(
    scores: PerToken,
    rankings: Int[Tensor, "ranking *batch token"],
    mask: Mask | None = None,
) -> Float[Tensor, "ranking *batch"]:
    """Plackett-Luce log-probability of each ranking; padding, ranked last, contributes nothing."""
    # Padding must not be -inf here: differences of infinities have no gradient. Far below every score is as good.
    floor = scores.detach().amin() - 1e4
    filled = scores if mask is None else torch.where(mask, scores, floor)
    ordered = filled.expand(rankings.shape).gather(-1, rankings)
    remaining = ordered.flip(-1).logcumsumexp(dim=-1).flip(-1)
    terms = ordered - remaining
    if mask is not None:
        terms = terms * mask.expand(rankings.shape).gather(-1, rankings)
    return terms.sum(dim=-1)


def rloo_loss(
    scores: PerToken,
    importance: PerToken,
    mask: Mask | None = None,
    *,
    num_rankings: int,
    generator: torch.Generator,
    normalise: bool = True,
) -> PerSequence:
    """Surrogate whose gradient is the leave-one-out estimate of the gradient of the expected normalised cost.

    Args:
        scores: Scores of the policy.
        importance: Importance of the same entries; 0 for padding.
        mask: True for entries, false for padding.
        num_rankings: K, rankings drawn for each sequence.
        generator: Source of the Gumbel noise.
        normalise: Divide advantages by their standard deviation over the K rankings, as the paper does. Without it,
            the estimate is unbiased.

    Raises:
        InputError: If fewer than two rankings are asked for: a leave-one-out baseline needs another one.
    """
    if num_rankings < MIN_RANKINGS:
        raise InputError(f"rloo: num_rankings is {num_rankings}, expected at least {MIN_RANKINGS}")
    with torch.no_grad():
        rankings = sample_rankings(mask_scores(scores, mask), num_rankings, generator)
        ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=importance.dtype)
        cost = (importance.expand(rankings.shape).gather(-1, rankings) * ranks).sum(dim=-1)
        cost = cost / optimal_cost(importance).clamp_min(TINY)
        advantage = (cost - cost.mean(dim=0)) * (num_rankings / (num_rankings - 1))
        if normalise:
            advantage = advantage / advantage.std(dim=0).clamp_min(TINY)
    return (advantage * log_probability(scores, rankings, mask)).mean(dim=0)
