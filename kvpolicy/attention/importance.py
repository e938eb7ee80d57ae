"""Importance: what a cache entry receives from the queries that come after the context.

    imp(i) = sum over future queries j of max over query heads g in the group of softmax_i(scaling * q_j^g . k_i)

Logits are capped where the model caps its own. The softmax runs over every position that the query may see; the maximum
over the group is taken per (query, key) pair.
Computed in blocks of queries, so that memory grows with the number of tokens and never with its square.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.attention.prefill import Prefill
from kvpolicy.attention.weights import attention_blocks


def importance(prefill: Prefill, *, num_context: int, num_future: int) -> Float[Tensor, "head context"]:
    """Importance of the first `num_context` entries to the `num_future` tokens that follow them.

    Returns:
        float32, non-negative; the sum of a row is at most `num_future` times the size of its group.
    """
    end = num_context + num_future
    queries = prefill.queries_before(end, num_future)
    received = torch.zeros(prefill.keys.shape[0], num_context, device=prefill.keys.device)
    for heads, weights in attention_blocks(queries, prefill.keys[:, :end], scaling=prefill.scaling):
        received[heads] += weights[..., :num_context].amax(dim=1).sum(dim=1)
    return received
