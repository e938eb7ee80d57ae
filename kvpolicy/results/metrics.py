"""What is measured on a compacted cache: how far its predictions move from the full cache's, and what it answers.

Each metric is defined once, here, under the name by which it is stored. `kl` and `kl_answer` are measured on every
sample; the others where the sample's task has them, the last two on the samples that are analysed.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

METRICS: Mapping[str, str] = {
    "kl": "mean KL divergence in nats from the full cache's next-token distribution to the compacted cache's, over the "
    "tokens of question and answer that run on the compacted cache, teacher-forced; lower is better",
    "kl_answer": "the same over the predictions of answer tokens alone; lower is better",
    "string_match": "share of the reference strings found in the greedy answer, ignoring case; higher is better",
    "retrieval": "share of the numbers in the greedy answer that are the right paragraph's; higher is better",
    "rouge_l": "ROUGE-L F-measure of the greedy answer against the reference; higher is better",
    "accuracy": "whether the right option has the highest log-likelihood; higher is better",
    "accuracy_normalised": "whether the right option has the highest log-likelihood per byte; higher is better",
    "perplexity": "exp of the mean negative log-likelihood of the future's tokens, teacher-forced; lower is better",
    "reward_correlation": "Spearman correlation, over the kept entries, of the future attention that they receive on "
    "the compacted cache with what they receive on the full one, mean over heads; higher is better",
    "missed_mass": "share of the full cache's future attention that went to entries that were evicted, mean over "
    "heads; lower is better",
}
LOWER_IS_BETTER = frozenset({"kl", "kl_answer", "perplexity", "missed_mass"})
GENERATED_METRICS = frozenset({"string_match", "retrieval", "rouge_l"})
"""Those of a text that the model writes itself; the others are about probabilities."""


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
