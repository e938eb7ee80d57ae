"""Importance: what a cache entry receives from the queries that come after the context (DESIGN: section 3).

    imp(i) = sum over future queries j of max over query heads g in the group of softmax_i(scaling * q_j^g . k_i)

The softmax runs over every position that the query may see; the maximum over the group is taken per (query, key) pair.
Computed in blocks of queries, so that memory grows with the number of tokens and never with its square.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.attention.prefill import Prefill

BLOCK_BYTES = 64 * 2**20


def importance(prefill: Prefill, *, num_context: int, num_future: int) -> Float[Tensor, "head context"]:
    """Importance of the first `num_context` entries to the `num_future` tokens that follow them.

    Returns:
        float32, non-negative; the sum of a row is at most `num_future` times the size of its group.
    """
    end = num_context + num_future
    queries = prefill.queries_before(end, num_future)
    received = torch.zeros(prefill.keys.shape[0], num_context, device=prefill.keys.device)
    for weights in attention_weights(queries, prefill.keys[:, :end], scaling=prefill.scaling):
        received += weights[..., :num_context].amax(dim=1).sum(dim=1)
    return received


def attention_weights(
    queries: Float[Tensor, "head group query dim"], keys: Float[Tensor, "head token dim"], *, scaling: float
) -> Iterator[Float[Tensor, "head group block token"]]:
    """Causal attention weights of the queries of the last tokens, a block of queries at a time.

    Args:
        queries: Post-RoPE queries of the last `query` of the `token` tokens.
        keys: Post-RoPE keys of all tokens.
        scaling: Factor on the logits.

    Yields:
        float32 weights over all tokens, zero where a query may not look. A block holds at most `BLOCK_BYTES`, but at
        least one query.
    """
    num_heads, group, num_queries, _ = queries.shape
    num_tokens = keys.shape[1]
    block = max(1, BLOCK_BYTES // (4 * num_heads * group * num_tokens))
    transposed = keys.float().transpose(1, 2)
    slots = torch.arange(num_tokens, device=keys.device)
    for first in range(0, num_queries, block):
        chunk = queries[:, :, first : first + block].float()
        size = chunk.shape[2]
        logits = (chunk.reshape(num_heads, group * size, -1) @ transposed).view(num_heads, group, size, num_tokens)
        own = num_tokens - num_queries + first + torch.arange(size, device=keys.device)
        logits = logits.mul_(scaling).masked_fill_(slots > own[:, None], -torch.inf)
        yield logits.softmax(dim=-1)
