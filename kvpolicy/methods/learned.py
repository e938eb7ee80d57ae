"""KVP: a learned policy as a method."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, Method, Scores


@runtime_checkable
class Scorer(Protocol):
    """The interface of a policy set: one network for every KV head, all applied at once."""

    def score(
        self,
        keys: Float[Tensor, "head token dim"],
        values: Float[Tensor, "head token dim"],
        positions: Int[Tensor, "shared token"],
    ) -> Scores:
        """Score every token of every head from its key, its value and its original position.

        Positions are one row for all heads, or one for each.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedPolicy(Method):
    """Scores of the networks of a policy set, one for every KV head (arXiv 2602.10238).

    It needs no queries: a token is scored by its own key, value and position.

    Attributes:
        policy: The policy set, or anything that scores as one.
    """

    name = "kvp"
    description = "KV Policy: a small network for every KV head, trained on future attention"
    reference = "arXiv 2602.10238"
    trained = "policy_set"

    policy: Scorer

    @torch.no_grad()
    def score(self, state: CacheState) -> Scores:
        """Score with the policy; no gradients are recorded."""
        scores = self.policy.score(state.keys, state.values, state.positions)
        if tuple(scores.shape) != (state.num_heads, state.num_tokens):
            raise InputError(
                f"method {self.name}: the policy gave scores of shape {tuple(scores.shape)}, expected "
                f"{(state.num_heads, state.num_tokens)}; was it trained for another model?"
            )
        return scores.float()
