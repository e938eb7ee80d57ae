"""The pairwise surrogate: RankNet's logistic loss on pairs of entries (Burges et al., ICML 2005).

Of a pair with imp(i) > imp(j) the loss is log(1 + exp(s_j - s_i)); pairs of equal importance say nothing and are left
out. The loss of a sequence is the mean over its pairs.

Departure: a step does not visit all n^2 pairs but a fresh sample of about n * `NUM_PARTNERS`: every entry with the
entries that some random distances away, counted around the end. All pairs are equally likely, so the expected loss is
the mean over all of them, and memory is linear in n.
"""

import torch

from kvpolicy.objectives.cost import Mask, PerSequence, PerToken

NUM_PARTNERS = 16


def pairwise_loss(
    scores: PerToken,
    importance: PerToken,
    mask: Mask | None = None,
    *,
    generator: torch.Generator,
    num_partners: int = NUM_PARTNERS,
) -> PerSequence:
    """Mean logistic loss of each sequence over the pairs that are drawn.

    Args:
        scores: Scores of the policy.
        importance: Importance of the same entries; 0 for padding.
        mask: True for entries, false for padding.
        generator: Source of the distances.
        num_partners: Distances drawn; from the number of tokens less one on, every pair is visited.
    """
    num_tokens = scores.shape[-1]
    distances = torch.randperm(num_tokens - 1, generator=generator, device=generator.device)[:num_partners] + 1
    total, count = scores.sum(dim=-1) * 0.0, torch.zeros_like(scores[..., 0])
    for distance in distances.tolist():
        order = (importance - importance.roll(distance, -1)).sign()
        if mask is not None:
            order = order * (mask & mask.roll(distance, -1))
        difference = scores - scores.roll(distance, -1)
        total = total + (torch.nn.functional.softplus(-order * difference) * order.abs()).sum(dim=-1)
        count = count + order.abs().sum(dim=-1)
    return total / count.clamp_min(1.0)
