"""TOVA: what the last query looks at."""

from dataclasses import dataclass

from kvpolicy.methods.base import CacheState, Method, Scores
from kvpolicy.methods.observed_attention import observed_attention


@dataclass(frozen=True, kw_only=True)
class TOVA(Method):
    """Attention of the last query, averaged over all query heads of the layer (arXiv 2401.06104, section 3).

    All KV heads of a layer keep the same tokens.

    Departures: the paper drops one token at every step and so may drop the newest; here the cache is compressed at once
    and the last token ranks above all others.
    """

    name = "tova"
    description = "Keeps what the last query attends to, the same tokens in all heads of a layer"
    reference = "arXiv 2401.06104"
    num_queries = 1

    def score(self, state: CacheState) -> Scores:
        """Score by the layer's mean attention, the last token above the possible 1."""
        attention = observed_attention(state, 1, method=self.name)
        by_layer = attention.reshape(-1, state.num_kv_heads * attention.shape[1], state.num_tokens).mean(dim=1)
        by_layer[:, -1] = 2.0
        return by_layer.repeat_interleave(state.num_kv_heads, dim=0)
