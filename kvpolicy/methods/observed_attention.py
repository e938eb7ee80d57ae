"""Attention that the context's own last queries pay to the cache, for the methods that rank by it.

Computed in blocks: memory grows with the number of tokens, never with its square. The attention of future
queries, which defines importance, is kvpolicy.attention's.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.methods.base import CacheState

MAX_BLOCK_BYTES = 8 * 2**20
"""Attention weights of one block; small enough to stay in a processor's cache, which is twice as fast as all heads
at once (1,100 tokens, 90 heads, two cores). A block has at least one query of one head."""

_BLOCK_QUERIES = 64


def observed_attention(
    state: CacheState, num_queries: int, *, method: str, max_block_bytes: int = MAX_BLOCK_BYTES
) -> Float[Tensor, "head group token"]:
    """Sum the attention of the context's last queries, per cached token.

    Causal: a query sees the cached tokens up to and including its own position, and the softmax is taken over those. In
    float32 whatever the type of the cache.

    Args:
        state: The cache and the queries.
        num_queries: Last queries to sum over; fewer where the context is shorter.
        method: Who asks, for the error.
        max_block_bytes: Bound on the weights of one block.

    Returns:
        For every query head the sum over queries; over all tokens it adds up to the number of queries.

    Raises:
        InputError: If the queries were not recorded.
    """
    recorded = state.last_queries(num_queries, method=method)
    num_heads, group, count, _ = recorded.shape
    first = state.num_tokens - count  # tokens before it are seen by all these queries
    is_whole = state.positions.shape[0] == 1  # then the query at an index sees the tokens up to that index
    query_positions = state.query_positions[0, -count:, None]
    query_bytes = group * state.num_tokens * 4
    block = max(1, min(_BLOCK_QUERIES, count, max_block_bytes // query_bytes))
    block_heads = max(1, min(num_heads, max_block_bytes // (query_bytes * block)))
    total = torch.zeros(num_heads, group, state.num_tokens, device=recorded.device)
    for head in range(0, num_heads, block_heads):
        here = slice(head, head + block_heads)
        keys = state.keys[here].float().transpose(1, 2)
        queries = recorded[here].float() * state.scaling
        for start in range(0, count, block):
            end = min(start + block, count)
            visible = first + end if is_whole else state.num_tokens  # what the block's last query sees, at most
            doubtful = slice(first + start if is_whole else first, visible)
            positions = state.positions[slice(None) if is_whole else here, None, None, doubtful]
            unseen = positions > query_positions[start:end]
            rows = queries[:, :, start:end].flatten(1, 2)
            logits = torch.bmm(rows, keys[..., :visible]).view(-1, group, end - start, visible)
            logits[..., doubtful].masked_fill_(unseen, -torch.inf)
            total[here, :, :visible] += logits.softmax(dim=-1).sum(dim=2)
    return total
