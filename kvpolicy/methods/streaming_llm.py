"""StreamingLLM: attention sinks and a sliding window."""

from dataclasses import dataclass

import torch

from kvpolicy.config.settings import Count
from kvpolicy.methods.base import CacheState, Method, Scores
from kvpolicy.methods.ranking import NUM_SINK_TOKENS


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Method):
    """The first tokens, then the most recent ones (arXiv 2309.17453, section 3.2).

    Sinks are identified by their original position, and no two tokens tie, so a second compression of a compacted cache
    keeps the same sinks as the first.

    Departure: the paper numbers positions within the cache; here tokens keep their original positions, as with every
    method.

    Attributes:
        num_sink_tokens: First tokens that rank above all others.
    """

    name = "streaming_llm"
    description = "Keeps the first tokens (attention sinks) and the most recent ones"
    reference = "arXiv 2309.17453"

    num_sink_tokens: Count = NUM_SINK_TOKENS

    def score(self, state: CacheState) -> Scores:
        """Score by position, the sinks above the last token."""
        positions = state.positions
        sinks = positions[:, -1:] + self.num_sink_tokens - positions
        # float32 holds integers exactly up to 16.7 million, beyond any context.
        scores = torch.where(positions < self.num_sink_tokens, sinks, positions).float()
        return scores.expand(state.num_heads, -1)
