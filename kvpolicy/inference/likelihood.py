"""Next-token predictions compared: from those of the full cache to those of a compacted one, and with tokens."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def kl_divergence(
    full_logits: Float[Tensor, "token vocab"], compacted_logits: Float[Tensor, "row token vocab"]
) -> Float[Tensor, "row token"]:
    """KL(full || compacted) in nats at every position of every row, in float32."""
    full = full_logits.float().log_softmax(dim=-1)
    probability = full.exp()
    # Row by row: a vocabulary of 50,000 or more times all rows would be gigabytes of float32.
    rows = [(probability * (full - row.float().log_softmax(dim=-1))).sum(dim=-1) for row in compacted_logits]
    return torch.stack(rows).clamp_min(0)


def token_log_likelihoods(
    logits: Float[Tensor, "row token vocab"], token_ids: Int[Tensor, "token"]
) -> Float[Tensor, "row token"]:
    """Log-probability, in nats and float32, of each token under the logits that predict it."""
    wanted = token_ids.to(logits.device)[:, None]
    rows = [row.float().log_softmax(dim=-1).gather(-1, wanted).squeeze(-1) for row in logits]  # for memory, as above
    return torch.stack(rows)
