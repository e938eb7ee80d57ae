"""Attention that the context's own last queries pay to the cache, for the methods that rank by it.

The attention of future queries, which defines importance, is kvpolicy.attention's.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.attention.weights import attention_blocks
from kvpolicy.methods.base import CacheState


def observed_attention(
    state: CacheState, num_queries: int, *, method: str, max_block_bytes: int | None = None
) -> Float[Tensor, "head group token"]:
    """Sum the attention of the context's last queries, per cached token.

    Causal: a query sees the cached tokens up to and including its own position, and the softmax is taken over those. In
    float32 whatever the type of the cache.

    Args:
        state: The cache and the queries.
        num_queries: Last queries to sum over; fewer where the context is shorter.
        method: Name of the method, for the error.
        max_block_bytes: Bound on the weights of one block.

    Returns:
        For every query head the sum over queries; over all tokens it adds up to the number of queries.

    Raises:
        InputError: If the queries were not recorded.
    """
    recorded = state.last_queries(num_queries, method=method)
    total = torch.zeros(*recorded.shape[:2], state.num_tokens, device=recorded.device)
    blocks = attention_blocks(
        recorded,
        state.keys,
        scaling=state.scaling,
        positions=None if state.positions.shape[0] < state.num_heads else state.positions,
        max_block_bytes=max_block_bytes,
    )
    for heads, weights in blocks:
        total[heads, :, : weights.shape[-1]] += weights.sum(dim=2)
    return total
