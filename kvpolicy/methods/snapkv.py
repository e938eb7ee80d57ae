"""SnapKV: what the end of the prompt looks at."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch.nn import functional

from kvpolicy.config.settings import Expect, Positive
from kvpolicy.methods.base import CacheState, Method, Scores
from kvpolicy.methods.observed_attention import observed_attention


@dataclass(frozen=True, kw_only=True)
class SnapKV(Method):
    """Mean attention of the last queries, smoothed over neighbours (arXiv 2404.14469, section 4).

    The attention that the observation window pays to each earlier token is averaged over the window's queries, pooled
    over neighbouring tokens (edges padded with zeros, as in the authors' code) and averaged over the group. The window
    itself ranks above everything else.

    Departures: the mean over the group is for grouped-query attention, which the authors' code does not treat (it is
    the field's practice); average pooling, kernel 5 and a window of 64 are the defaults of that code. The window is
    ordered by recency, so that a budget smaller than it keeps the newest tokens, and a context that is no longer than
    the window is ordered by recency alone.

    Attributes:
        window_tokens: Last tokens whose queries vote, and which are kept.
        kernel: Neighbouring tokens that are averaged; odd.
    """

    name = "snapkv"
    description = "Keeps what the last 64 queries attend to, smoothed over neighbours"
    reference = "arXiv 2404.14469"

    window_tokens: Positive = 64
    kernel: Annotated[Positive, Expect(lambda count: count % 2, "an odd number of tokens")] = 5

    @property
    def num_queries(self) -> int:
        """The observation window."""
        return self.window_tokens

    def score(self, state: CacheState) -> Scores:
        """Score earlier tokens by pooled attention, at most 1, and the window from 1 to 2."""
        num_window = min(self.window_tokens, state.num_tokens)
        num_earlier = state.num_tokens - num_window
        recency = torch.arange(1, num_window + 1, device=state.keys.device) / num_window
        window = (1.0 + recency).expand(state.num_heads, -1)
        if not num_earlier:
            return window
        attention = observed_attention(state, num_window, method=self.name)[..., :num_earlier] / num_window
        pooled = functional.avg_pool1d(attention, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.cat((pooled.mean(dim=1), window), dim=1)
