"""One forward pass over a whole sequence that keeps what everything else needs: keys, values, queries and logits.

A single prefill serves both settings, every method and every budget of an example: with causal attention the cache of
the context alone is a prefix of the cache of the whole sequence.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.session import attend_causally, attention_session
from kvpolicy.errors import InputError
from kvpolicy.models.finite import require_finite_entries
from kvpolicy.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """The results of one pass over `token` tokens.

    Attributes:
        keys: Post-RoPE keys of every KV head (layer-major).
        values: Values of the same entries.
        queries: Post-RoPE queries of the last `query` tokens, grouped by the KV head that they read.
        logits: Next-token logits after the last `logit` tokens.
        scaling: The model's factor on the products of queries and keys, and its cap.
        num_kv_heads: KV heads in a layer.
    """

    keys: Float[Tensor, "head token dim"]
    values: Float[Tensor, "head token dim"]
    queries: Float[Tensor, "head group query dim"]
    logits: Float[Tensor, "logit vocab"]
    scaling: LogitScale
    num_kv_heads: int

    @property
    def num_tokens(self) -> int:
        """Length of the sequence."""
        return int(self.keys.shape[1])

    @property
    def first_query(self) -> int:
        """Position of the first recorded query."""
        return self.num_tokens - int(self.queries.shape[2])

    def queries_before(self, end: int, num_queries: int) -> Float[Tensor, "head group query dim"]:
        """Queries of the last `num_queries` tokens before position `end`, as a view."""
        stop = end - self.first_query
        return self.queries[:, :, max(0, stop - num_queries) : stop]


class _Recording:
    """Attends causally and keeps every layer's keys and values, and the last queries."""

    def __init__(self, model: LanguageModel, num_tokens: int, num_queries: int) -> None:
        spec, dtype, device = model.spec, model.dtype, model.device
        self._num_kv_heads = spec.num_kv_heads
        self._num_queries = num_queries
        self.num_positions = num_tokens
        self.keys = torch.empty(spec.num_heads, num_tokens, spec.head_dim, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.queries = torch.empty(
            spec.num_heads, spec.group_size, num_queries, spec.head_dim, dtype=dtype, device=device
        )
        self.scaling = LogitScale(factor=1.0)
        self.num_calls = dict.fromkeys(range(spec.num_layers), 0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: LogitScale) -> Tensor:
        heads = slice(layer * self._num_kv_heads, (layer + 1) * self._num_kv_heads)
        self.keys[heads] = key[0]
        self.values[heads] = value[0]
        last = query[0, :, query.shape[2] - self._num_queries :]
        self.queries[heads] = last.reshape(self.queries[heads].shape)
        self.scaling = scaling
        self.num_calls[layer] += 1
        return attend_causally(query, key, value, scaling)


def prefill(model: LanguageModel, token_ids: Int[Tensor, "token"], *, num_queries: int, num_logits: int = 1) -> Prefill:
    """Run the model over `token_ids` and keep its cache, its last queries and its last logits.

    Args:
        model: The language model.
        token_ids: The whole sequence.
        num_queries: How many of the last queries to keep (the future's for importance; all for H2O).
        num_logits: After how many of the last tokens to return next-token logits.

    Raises:
        InputError: If the sequence is longer than the model's positions, its attention is not supported, or what it
            computes is not finite.
    """
    num_tokens = token_ids.shape[0]
    model = model if model.sequence_tokens else model.for_sequence(num_tokens)
    recording = _Recording(model, num_tokens, min(num_queries, num_tokens))
    with attention_session(recording):
        logits = model.logits(token_ids[None], torch.arange(num_tokens)[None], num_logits)
    _require_one_call(recording.num_calls)
    by_layer = (model.spec.num_layers, -1, num_tokens, model.spec.head_dim)
    require_finite_entries(recording.keys.view(by_layer), recording.values.view(by_layer))
    return Prefill(
        keys=recording.keys,
        values=recording.values,
        queries=recording.queries,
        logits=logits[0],
        scaling=recording.scaling,
        num_kv_heads=model.spec.num_kv_heads,
    )


def _require_one_call(num_calls: dict[int, int]) -> None:
    """A second call of a layer would take the place of the first in the cache, and a layer without one leaves none."""
    for wrong, ran in (
        ([layer for layer, count in num_calls.items() if not count], "no attention"),
        ([layer for layer, count in num_calls.items() if count > 1], "attention more than once"),
    ):
        if wrong:
            raise InputError(
                f"layers {', '.join(map(str, wrong))} of {len(num_calls)} ran {ran} through transformers' attention "
                "interface: every layer must have the attention that is ranked, once"
            )
