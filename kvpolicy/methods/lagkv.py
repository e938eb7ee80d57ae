"""LagKV: tokens that stand out against the partition after theirs."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.config.settings import Count, Positive
from kvpolicy.methods.base import CacheState, Method, Scores
from kvpolicy.methods.ranking import NUM_SINK_TOKENS

_MIN_SPAN = 1e-12  # a channel that varies less counts as constant


@dataclass(frozen=True, kw_only=True)
class LagKV(Method):
    """Lag-relative information of keys and values (arXiv 2504.04704).

    After the sinks the cache is cut into partitions of `lag_tokens`. Keys and values of each are min-max normalised per
    channel by the partition that follows, the standard deviation over channels of each token goes through a softmax
    within the partition, keys and values are averaged, and tokens are ranked within their partition: every partition
    gives up the same share of its tokens. The last whole partition has nothing after it and forms, with the incomplete
    rest, the sliding window, which ranks above all partitions.

    Departures. The window is ordered by recency, where the field's reference implementation gives it one constant: a
    budget below the sinks and the window (up to twice the lag) then keeps the newest of it. A channel that is constant
    in the following partition is divided by 1 instead of 0.

    Attributes:
        num_sink_tokens: First tokens, which rank above all others.
        lag_tokens: Length of a partition.
    """

    name = "lagkv"
    description = "Keeps tokens whose keys and values stand out against the partition that follows"
    reference = "arXiv 2504.04704"

    num_sink_tokens: Count = NUM_SINK_TOKENS
    lag_tokens: Positive = 128

    def score(self, state: CacheState) -> Scores:
        """Score within partitions; by recency alone where there are fewer than two partitions."""
        num_sinks = min(self.num_sink_tokens, state.num_tokens)
        num_partitions = (state.num_tokens - num_sinks) // self.lag_tokens
        num_ranked = max(0, num_partitions - 1) * self.lag_tokens
        parts = [torch.full((state.num_heads, num_sinks), 3.0, device=state.keys.device)]
        if num_ranked:
            end = num_sinks + num_ranked + self.lag_tokens
            shape = (state.num_heads, num_partitions, self.lag_tokens, -1)
            keys = state.keys[:, num_sinks:end].float().reshape(shape)
            values = state.values[:, num_sinks:end].float().reshape(shape)
            information = (_lag_relative(keys) + _lag_relative(values)) / 2
            ranks = information.argsort(dim=-1, stable=True).argsort(dim=-1)
            parts.append((ranks / self.lag_tokens).flatten(1))  # below 1
        num_window = state.num_tokens - num_sinks - num_ranked
        recency = torch.arange(num_window, device=state.keys.device) / max(1, num_window)  # below 1
        parts.append(1.0 + recency.expand(state.num_heads, -1))
        return torch.cat(parts, dim=1)


def _lag_relative(
    states: Float[Tensor, "head partition lag dim"],
) -> Float[Tensor, "head partition-1 lag"]:
    """How far each token's channels spread when measured by the next partition; a softmax within the partition."""
    following = states[:, 1:]
    low = following.amin(dim=2, keepdim=True)
    span = following.amax(dim=2, keepdim=True) - low
    normalised = (states[:, :-1] - low) / torch.where(span > _MIN_SPAN, span, torch.ones_like(span))
    return normalised.std(dim=-1).softmax(dim=-1)
