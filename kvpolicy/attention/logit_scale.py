"""From products of queries and keys to attention logits: the model's factor and, where it has one, its soft cap."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LogitScale:
    """The logit that a model computes from the product of a query and a key.

    Attributes:
        factor: Factor on the product.
        cap: Logits are cap * tanh(logit / cap), as in Gemma 2 (arXiv 2408.00118, section 2); None leaves them.
    """

    factor: float
    cap: float | None = None

    def capped(self, logits: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """The logits of scaled products."""
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap
