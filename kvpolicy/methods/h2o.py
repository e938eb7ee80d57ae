"""H2O: heavy hitters of all attention so far."""

from dataclasses import dataclass

import torch

from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, Method, Scores
from kvpolicy.methods.observed_attention import observed_attention


@dataclass(frozen=True, kw_only=True)
class H2O(Method):
    """Attention that a token received from all queries of the context (arXiv 2306.14048, section 4, algorithm 1).

    Departures: the sum is divided by the number of queries that could see the token, without which early tokens win by
    age alone (the field's reference implementation does the same); heads of a group are averaged; the cache is
    compressed once with the attention of the full cache, not at every step; and the window of recent tokens, half the
    budget in the paper, is the one that every method is given.
    """

    name = "h2o"
    description = "Keeps tokens that received most attention so far, per query that could see them"
    reference = "arXiv 2306.14048"
    recompression_obstacle = "it needs the queries of the whole context, not of its end alone"
    num_queries = None

    def score(self, state: CacheState) -> Scores:
        """Score by the mean attention over the queries that see the token."""
        if state.num_queries != state.num_tokens:
            raise InputError(
                f"method {self.name}: {state.num_queries} queries for {state.num_tokens} tokens, expected one each; "
                "record the queries of the whole context"
            )
        attention = observed_attention(state, state.num_tokens, method=self.name)
        num_seeing = torch.arange(state.num_tokens, 0, -1, device=attention.device)
        return attention.mean(dim=1) / num_seeing
