"""Differences between the KV heads of a model: the shape of their importance, and how alike they rank.

All of it is of importance as policies are trained on it, first and last tokens included, on samples that no policy was
trained on. Figures of a sample are averaged over samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.analysis.ranks import normalised_ranks
from kvpolicy.errors import InputError
from kvpolicy.objectives.cost import TINY

ZIPF_MASS = 0.99
"""The slope is that of the ranks that hold this share of the mass: those behind are tokens of no importance, many, and
would decide it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadShapes:
    """The heads of a model, by what the future attends to in them.

    Attributes:
        zipf_slope: See `zipf_slope`; NaN for a head that has none in any sample.
        effective_tokens: See `effective_tokens`.
        rank_deviation: Mean squared distance of a head's normalised rank of a token from the mean over all heads. Its
            mean over heads is the variance of ranks across heads: 0 where all rank alike, 1/12 on average where each
            ranks at random and there are many.
        rank_correlation: Spearman's between each two heads; NaN where a head has no order in any sample.
        num_samples: How many samples that is the mean of.
    """

    zipf_slope: Float[Tensor, "head"]
    effective_tokens: Float[Tensor, "head"]
    rank_deviation: Float[Tensor, "head"]
    rank_correlation: Float[Tensor, "head head"]
    num_samples: int

    @property
    def rank_variance(self) -> float:
        """Variance across heads of a token's normalised rank, mean over tokens and samples."""
        return float(self.rank_deviation.mean())


def head_shapes(samples: Sequence[Float[Tensor, "head _"]]) -> HeadShapes:
    """Describe every head by its importance in held-out samples.

    Args:
        samples: Importance of each sample; the number of tokens may differ.

    Raises:
        InputError: If there are no samples, or a value is NaN.
    """
    if not samples:
        raise InputError("head shapes: no samples, expected the importance of at least one")
    ranks = [normalised_ranks(importance) for importance in samples]
    return HeadShapes(
        zipf_slope=_mean([zipf_slope(importance) for importance in samples]),
        effective_tokens=_mean([effective_tokens(importance) for importance in samples]),
        rank_deviation=_mean([(of_head - of_head.mean(dim=0)).square().mean(dim=1) for of_head in ranks]),
        rank_correlation=_mean([_correlation(of_head) for of_head in ranks]),
        num_samples=len(samples),
    )


def zipf_slope(importance: Float[Tensor, "head token"], *, mass: float = ZIPF_MASS) -> Float[Tensor, "head"]:
    """Exponent a of the power law rank^-a that is nearest to each head's importance in descending order.

    The least-squares line of log importance on log rank, every rank weighing alike, over the first ranks that together
    hold `mass` of the importance.

    Returns:
        0 where all tokens are alike, 1 for Zipf's law, more for a sharper head, in float64; NaN where fewer than two
        ranks hold the mass, which is no line.
    """
    descending = importance.double().sort(dim=1, descending=True).values
    total = descending.sum(dim=1, keepdim=True)
    before = descending.cumsum(dim=1) - descending
    counts = ((before < mass * total) & (descending > 0)).double()
    num_ranks = counts.sum(dim=1, keepdim=True)
    log_rank = torch.arange(1, descending.shape[1] + 1, device=importance.device).double().log()
    x = (log_rank - (counts * log_rank).sum(dim=1, keepdim=True) / num_ranks.clamp_min(1)) * counts
    slope = (x * descending.clamp_min(torch.finfo(torch.float64).tiny).log()).sum(dim=1) / x.square().sum(dim=1)
    return torch.where(num_ranks[:, 0] > 1, -slope, torch.nan)


def effective_tokens(importance: Float[Tensor, "head token"]) -> Float[Tensor, "head"]:
    """How many tokens, all alike, would be spread as widely as each head's importance: exp of its entropy.

    Returns:
        From 1 to the number of tokens, in float64; that number for a head that receives nothing.
    """
    wide = importance.double()
    total = wide.sum(dim=1, keepdim=True)
    share = torch.where(total > TINY, wide / total.clamp_min(TINY), 1.0 / wide.shape[1])
    entropy: Tensor = torch.special.entr(share).sum(dim=1)
    return entropy.exp()


def _correlation(ranks: Float[Tensor, "head token"]) -> Float[Tensor, "head head"]:
    centred = ranks - ranks.mean(dim=1, keepdim=True)
    size = centred.square().sum(dim=1).sqrt()
    unit = centred / torch.where(size > 0, size, torch.nan)[:, None]
    return (unit @ unit.T).clamp(-1, 1)


def _mean(samples: Sequence[Tensor]) -> Tensor:
    """Over the samples in which a figure is defined."""
    return torch.stack(list(samples)).nanmean(dim=0)
