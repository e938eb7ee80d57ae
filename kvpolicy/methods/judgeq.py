"""Judge Q: what trained soft tokens attend to from the end of the prompt."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.attention.probe import probe_attention
from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, Method, Scores


@runtime_checkable
class Probing(Protocol):
    """The interface of trained soft tokens."""

    @property
    def embeddings(self) -> Float[Tensor, "probe width"]:
        """Embeddings that are run on top of the context."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class JudgeQ(Method):
    """Mean attention of trained soft tokens that follow the context (arXiv 2509.10798).

    The soft tokens are run once on top of the full cache and leave nothing in it.
    `kvpolicy.training.soft_token_training` trains them, and says what differs from the paper.

    Attributes:
        soft_tokens: The trained soft tokens, or anything with embeddings.
    """

    name = "judgeq"
    description = "Judge Q: keeps what 32 soft tokens attend to, trained to attend as the response does"
    reference = "arXiv 2509.10798"
    recompression_obstacle = "its soft tokens run on the full cache of the context, at its end"
    trained = "soft_tokens"

    soft_tokens: Probing

    @property
    def probe(self) -> Float[Tensor, "probe width"]:
        """The soft tokens' embeddings."""
        return self.soft_tokens.embeddings

    @torch.no_grad()
    def score(self, state: CacheState) -> Scores:
        """Score by the attention that the soft tokens pay, averaged over them and over the group."""
        if state.probe is None:
            raise InputError(
                f"method {self.name}: no probe in the cache state, expected what the soft tokens became on top of the "
                "context; run kvpolicy.attention.probe.run_probe with the method's probe"
            )
        return probe_attention(state.probe, state.keys, scaling=state.scaling)
