"""Supervised surrogates that regress importance point by point: `mse` on importance itself, `log_mse` on its log.

The target is standardised sequence by sequence (mean 0, variance 1 over its tokens), which changes no ranking and makes
sequences and heads of any scale weigh the same. So a loss is the share of the target's variance that the scores leave
unexplained: 0 is perfect, and scores that are 0 everywhere have 1.

Unlike the policy gradient these weigh every token alike, wherever it ranks.
"""

import torch
from torch import Tensor

from kvpolicy.objectives.cost import TINY, Mask, PerSequence, PerToken

# What receives less than this share of the mean importance is taken to receive that: the log of next to nothing would
# otherwise be most of the variance.
LEAST_SHARE = 1e-4


def mse_loss(scores: PerToken, importance: PerToken, mask: Mask | None = None) -> PerSequence:
    """Mean squared error of each sequence's scores to its standardised importance.

    Args:
        scores: Scores of the policy.
        importance: Importance of the same entries; 0 for padding.
        mask: True for entries, false for padding.
    """
    return _unexplained(scores, importance, mask)


def log_mse_loss(scores: PerToken, importance: PerToken, mask: Mask | None = None) -> PerSequence:
    """Mean squared error of each sequence's scores to its standardised log-importance.

    Args:
        scores: Scores of the policy.
        importance: Importance of the same entries; 0 for padding.
        mask: True for entries, false for padding.
    """
    least = LEAST_SHARE * _mean(importance, _weight(scores, mask))
    return _unexplained(scores, importance.maximum(least).clamp_min(TINY).log(), mask)


def _unexplained(scores: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    weight = _weight(scores, mask)
    centred = target - _mean(target, weight)
    variance = _mean(centred.square(), weight)
    error = _mean((scores - centred / variance.clamp_min(TINY).sqrt()).square(), weight)
    # Where all importance is equal every ranking is perfect: nothing to learn.
    return torch.where(variance > TINY, error, 0.0).squeeze(-1)


def _weight(scores: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(scores) if mask is None else mask.to(scores.dtype)


def _mean(entries: Tensor, weight: Tensor) -> Tensor:
    mean: Tensor = (entries * weight).sum(dim=-1, keepdim=True) / weight.sum(dim=-1, keepdim=True)
    return mean
