"""No eviction: the row that every curve is compared with."""

from dataclasses import dataclass

import torch

from kvpolicy.methods.base import CacheState, Method, Scores


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Keeps everything. It prefers no token, so all scores are equal; callers ask `evicts` and select nothing."""

    name = "full"
    description = "Keeps the whole cache, whatever the budget"
    reference = "none"
    recompression_obstacle = "it keeps everything, so that its cache grows with the context"
    evicts = False

    def score(self, state: CacheState) -> Scores:
        """Score every token alike."""
        return torch.zeros(state.num_heads, state.num_tokens, device=state.keys.device)
