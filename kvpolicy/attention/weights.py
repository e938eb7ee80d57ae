"""Causal attention weights of the last queries of a sequence, in blocks.

Memory grows with the tokens and never with their square.

Everything that ranks by attention adds its weights up from here: importance, the methods that observe attention, and
the soft tokens. Gradients flow through, where the caller allows them.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.logit_scale import LogitScale

MAX_BLOCK_BYTES = 8 * 2**20
"""Weights of one block; small enough to stay in a processor's cache, which is twice as fast as all heads at once (1,100
tokens, 90 heads, two cores). A block has at least one query of one head."""

_BLOCK_QUERIES = 64


def attention_blocks(
    queries: Float[Tensor, "head group query dim"],
    keys: Float[Tensor, "head token dim"],
    *,
    scaling: LogitScale,
    positions: Int[Tensor, "head token"] | None = None,
    max_block_bytes: int | None = None,
) -> Iterator[tuple[slice, Float[Tensor, "some group block visible"]]]:
    """Attention weights of the queries of the last tokens, for some heads and some queries at a time.

    Causal: a query sees the tokens up to and including its own position, and the softmax is taken over those. In
    float32 whatever the type of the cache.

    Args:
        queries: Post-RoPE queries of the last `query` of the `token` tokens.
        keys: Post-RoPE keys of all tokens.
        scaling: The model's factor on the products of queries and keys, and its cap.
        positions: Original positions of the tokens, ascending, where some of a longer sequence are left; the queries
            are those of consecutive positions up to the last. None where the sequence is whole.
        max_block_bytes: Bound on the weights of one block; `MAX_BLOCK_BYTES` where none is given.

    Yields:
        The heads of a block, and their weights over the first tokens, up to the last that the block's last query sees;
        zero where another query may not look.
    """
    num_heads, group, count, _ = queries.shape
    num_tokens = keys.shape[1]
    first = num_tokens - count
    most_bytes = MAX_BLOCK_BYTES if max_block_bytes is None else max_block_bytes
    query_bytes = group * num_tokens * 4
    block = max(1, min(_BLOCK_QUERIES, count, most_bytes // query_bytes))
    block_heads = max(1, min(num_heads, most_bytes // (query_bytes * block)))
    unseen = torch.ones(block, block, dtype=torch.bool, device=queries.device).triu(1)
    backwards = torch.arange(count - 1, -1, -1, device=queries.device)[:, None]
    for head in range(0, num_heads, block_heads):
        here = slice(head, min(head + block_heads, num_heads))
        transposed = keys[here].float().transpose(1, 2)
        scaled = queries[here].float() * scaling.factor
        for start in range(0, count, block):
            end = min(start + block, count)
            visible = first + end if positions is None else num_tokens  # later tokens cost nothing
            rows = scaled[:, :, start:end].flatten(1, 2)
            logits = scaling.capped(torch.bmm(rows, transposed[..., :visible]).view(-1, group, end - start, visible))
            if positions is None:
                logits[..., first + start :].masked_fill_(unseen[: end - start, : end - start], -torch.inf)
            else:  # tokens before `first` are seen by all these queries
                late = positions[here, None, None, first:] > positions[here, None, None, -1:] - backwards[start:end]
                logits[..., first:].masked_fill_(late, -torch.inf)
            yield here, logits.softmax(dim=-1)
