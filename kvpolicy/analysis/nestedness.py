"""Are the best sets of two budgets nested? One ranking serves every budget only as far as they are.

With importance fixed they are, by construction: the best b entries are the first b of one order, so the smaller set
lies in the larger one. But importance is not quite fixed: on the cache that a budget has left, the future attends
otherwise (`kvpolicy.analysis.reward`). So what is measured here is the way over a larger budget: keep the best b2,
recompute the importance of what is left, keep the best b1 < b2 by that, and compare with the best b1 of the full
cache. The other way round, the difference says what one ranking for all budgets can lose to ranking anew at each.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.analysis.reward import missed_mass
from kvpolicy.methods.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS, kept_positions


@dataclass(frozen=True, kw_only=True, eq=False)
class Nestedness:
    """How the smaller set, chosen on the larger budget's cache, compares with the best of the full cache.

    Attributes:
        overlap: Share of the entries that a head could choose (those that are always kept are no choice) that both
            sets have; 1 where there was nothing to choose.
        excess_missed_mass: Share of the full cache's importance that the smaller set misses and the best set of its
            size does not; never below 0.
    """

    overlap: Float[Tensor, "head"]
    excess_missed_mass: Float[Tensor, "head"]


def compare_nested_sets(
    full: Float[Tensor, "head token"],
    recomputed: Float[Tensor, "head larger"],
    larger: Int[Tensor, "head larger"],
    budget: int,
    *,
    num_sink_tokens: int = NUM_SINK_TOKENS,
    num_recent_tokens: int = NUM_RECENT_TOKENS,
) -> Nestedness:
    """Choose a smaller set on the cache that a larger budget left, and compare it with the full cache's best.

    Args:
        full: Importance on the full cache.
        recomputed: Importance of the entries of the larger set, on the cache that has only these.
        larger: Indices of the larger set, ascending: `kept_positions(full, b2)` with the same always-kept tokens.
        budget: Entries of the smaller set, b1.
        num_sink_tokens: First tokens that are always kept.
        num_recent_tokens: Last tokens that are always kept.

    Raises:
        InputError: If the budget is below the always-kept tokens or above the larger one.
    """
    always = {"num_sink_tokens": num_sink_tokens, "num_recent_tokens": num_recent_tokens}
    larger = larger.to(full.device)
    # The first and last entries of the larger set are the first and last tokens.
    smaller = larger.gather(1, kept_positions(recomputed.to(full.device), budget, **always))
    best = kept_positions(full, budget, **always)
    num_chosen = budget - num_sink_tokens - num_recent_tokens
    num_shared = _membership(smaller, full).logical_and(_membership(best, full)).sum(dim=1)
    chosen_shared = num_shared - num_sink_tokens - num_recent_tokens
    return Nestedness(
        overlap=chosen_shared / num_chosen if num_chosen else torch.ones_like(full[:, 0]),
        excess_missed_mass=(missed_mass(full, smaller) - missed_mass(full, best)).clamp_min(0.0),
    )


def _membership(indices: Int[Tensor, "head kept"], like: Float[Tensor, "head token"]) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter_(1, indices, True)
