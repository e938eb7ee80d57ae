"""What is measured on a batch of compacted caches: fidelity, perplexity, the choice of an option.

All of it runs on the same caches: question and reference answer first, then, the answer forgotten, every option in
turn; greedy answers follow (`kvpolicy.evaluation.answers`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.benchmarks.scoring import score_options
from kvpolicy.evaluation.caches import RowBatch
from kvpolicy.evaluation.continuation import Continuation
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.likelihood import kl_divergence, token_log_likelihoods
from kvpolicy.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What was measured on some rows, whose caches are then at the end of the question.

    Attributes:
        figures: Metric to one figure a row.
        before_answer: What each row predicts after the question.
    """

    figures: dict[str, list[float]]
    before_answer: Float[Tensor, "row vocab"]


def measure_rows(model: LanguageModel, batch: RowBatch, continuation: Continuation, metrics: Sequence[str]) -> Measured:
    """Run what follows the context on every row of a batch, all but answers of its own.

    Args:
        model: The language model.
        batch: Rows whose caches of the context have room for what follows.
        continuation: What follows.
        metrics: Of the sample's task.
    """
    cut, cache = continuation.cut, batch.cache
    num_kept, num_rows = cache.num_past_tokens, cache.num_rows
    # The last token of the future predicts nothing that the reference knows.
    future = continuation.token_ids[:-1]
    logits = cache.run(
        model,
        future.expand(num_rows, -1),
        continuation.positions(len(future), num_rows=num_rows),
        num_logits=len(future),
    )
    divergence = kl_divergence(continuation.full_logits[1:-1], logits)
    of_answer = divergence[:, max(0, cut.num_question - 1) :]
    figures = {"kl": divergence.mean(dim=1).tolist(), "kl_answer": of_answer.mean(dim=1).tolist()}
    if "perplexity" in metrics:
        figures["perplexity"] = _perplexity(continuation, torch.cat([batch.after_context[:, None], logits], dim=1))
    before_answer = logits[:, cut.num_question - 1] if cut.num_question else batch.after_context
    end_of_question = num_kept + cut.num_question
    if continuation.example.option_ids:
        figures |= _option_figures(model, cache, continuation, before_answer, end_of_question)
    cache.crop(end_of_question)
    return Measured(figures=figures, before_answer=before_answer)


def _perplexity(continuation: Continuation, logits: Float[Tensor, "row token vocab"]) -> list[float]:
    """Of the future's tokens, the first of which is predicted after the context."""
    return token_log_likelihoods(logits, continuation.token_ids).mean(dim=1).neg().exp().tolist()


def _option_figures(
    model: LanguageModel,
    cache: CompactedCache,
    continuation: Continuation,
    before_answer: Float[Tensor, "row vocab"],
    end_of_question: int,
) -> dict[str, list[float]]:
    """Whether each row prefers the right option."""
    sample, num_rows = continuation.example.sample, cache.num_rows
    likelihoods = []
    for option in continuation.example.option_ids:
        token_ids = torch.tensor(option, device=before_answer.device)
        total = token_log_likelihoods(before_answer[:, None], token_ids[:1]).sum(dim=1)
        if len(option) > 1:
            cache.crop(end_of_question)
            logits = cache.run(
                model,
                token_ids[:-1].expand(num_rows, -1),
                continuation.positions(len(option) - 1, num_rows=num_rows, first=continuation.cut.num_question),
                num_logits=len(option) - 1,
            )
            total = total + token_log_likelihoods(logits, token_ids[1:]).sum(dim=1)
        likelihoods.append(total)
    rows = [score_options(sample, row) for row in torch.stack(likelihoods, dim=1).tolist()]
    return {name: [row[name] for row in rows] for name in rows[0]}
