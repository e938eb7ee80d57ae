"""What is measured on a compacted cache: how far its predictions move from the full cache's, and what it answers.

Each metric is defined once, here: `kl`, `kl_answer` and `string_match` are the names under which they are stored.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

METRICS: Mapping[str, str] = {
    "kl": "mean KL divergence in nats from the full cache's next-token distribution to the compacted cache's, over the "
    "tokens of question and answer that run on the compacted cache, teacher-forced; lower is better",
    "kl_answer": "the same over the predictions of answer tokens alone; lower is better",
    "string_match": "share of the reference strings found in the greedy answer, ignoring case; higher is better",
}
LOWER_IS_BETTER = frozenset({"kl", "kl_answer"})


def kl_divergence(
    full_logits: Float[Tensor, "token vocab"], compacted_logits: Float[Tensor, "row token vocab"]
) -> Float[Tensor, "row token"]:
    """KL(full || compacted) in nats at every position of every row, in float32."""
    full = full_logits.float().log_softmax(dim=-1)
    probability = full.exp()
    # Row by row: a vocabulary of 50,000 or more times all rows would be gigabytes of float32.
    rows = [(probability * (full - row.float().log_softmax(dim=-1))).sum(dim=-1) for row in compacted_logits]
    return torch.stack(rows).clamp_min(0)
