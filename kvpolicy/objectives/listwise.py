"""The listwise surrogate: ListNet's softmax cross entropy (Cao et al., Learning to Rank, ICML 2007, top-one form).

The probability that an entry comes first is softmax(scores) for the policy, and its share of the importance for the
target. ListNet takes a softmax of graded relevance there; importance already is a distribution of attention, so it is
only divided by its sum. The target's entropy, a constant, is subtracted: the loss is a KL divergence, 0 is perfect.
"""

import torch

from kvpolicy.objectives.cost import TINY, Mask, PerSequence, PerToken, mask_scores


def listwise_loss(scores: PerToken, importance: PerToken, mask: Mask | None = None) -> PerSequence:
    """KL divergence from the importance's distribution to the scores', of each sequence, in nats.

    Args:
        scores: Scores of the policy.
        importance: Importance of the same entries; 0 for padding.
        mask: True for entries, false for padding.
    """
    share = importance / importance.sum(dim=-1, keepdim=True).clamp_min(TINY)
    log_probability = mask_scores(scores, mask).log_softmax(dim=-1)
    if mask is not None:
        log_probability = torch.where(mask, log_probability, 0.0)  # 0 times minus infinity is no number
    return (torch.xlogy(share, share) - share * log_probability).sum(dim=-1)
