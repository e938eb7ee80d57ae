"""No eviction: the row that every curve is compared with."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.methods.base import CacheState, Method


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """Keeps everything. It prefers no token, so all scores are equal; callers ask `evicts` and select nothing."""

    name: ClassVar[str] = "full"
    description: ClassVar[str] = "Keeps the whole cache, whatever the budget"
    reference: ClassVar[str] = "none"
    recompression_obstacle: ClassVar[str | None] = "it keeps everything, so that its cache grows with the context"
    evicts: ClassVar[bool] = False

    def score(self, state: CacheState) -> Float[Tensor, "head token"]:
        """Score every token alike."""
        return torch.zeros(state.num_heads, state.num_tokens, device=state.keys.device)
