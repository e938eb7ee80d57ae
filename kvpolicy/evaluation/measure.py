"""Measure a batch of compacted caches: fidelity, perplexity, the choice of an option.

All of it runs on the same caches: question and reference answer first, then, the answer forgotten, every option in
turn; greedy answers follow (`kvpolicy.evaluation.answers`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.benchmarks.scoring import score_options
from kvpolicy.evaluation.caches import RowBatch
from kvpolicy.inference.cache import run_alike
from kvpolicy.inference.likelihood import kl_divergence, token_log_likelihoods


def measure_rows(batch: RowBatch) -> tuple[dict[str, list[float]], Float[Tensor, "row vocab"]]:
    """Run everything that follows the context, but for answers of the model's own, on every row of a batch.

    Returns:
        Metric to one figure a row; and what each row predicts after the question, where its cache then ends.
    """
    context, cache = batch.ranked.context, batch.cache
    cut, future = context.cut, context.future_ids
    end_of_question = cache.num_past_tokens + cut.num_question
    # The last token of the future predicts nothing that the reference knows.
    logits = run_alike(context.model, cache, future[:-1], first_position=cut.num_context)
    divergence = kl_divergence(context.full_logits[1:-1], logits)
    of_answer = divergence[:, max(0, cut.num_question - 1) :]
    figures = {"kl": divergence.mean(dim=1).tolist(), "kl_answer": of_answer.mean(dim=1).tolist()}
    if "perplexity" in task_info(context.example.sample.task).metrics:
        predictions = torch.cat([batch.after_context[:, None], logits], dim=1)
        figures["perplexity"] = token_log_likelihoods(predictions, future).mean(dim=1).neg().exp().tolist()
    before_answer = logits[:, cut.num_question - 1] if cut.num_question else batch.after_context
    if context.example.option_ids:
        figures |= _option_figures(batch, before_answer, end_of_question)
    cache.crop(end_of_question)
    return figures, before_answer


def _option_figures(
    batch: RowBatch, before_answer: Float[Tensor, "row vocab"], end_of_question: int
) -> dict[str, list[float]]:
    """Whether each row prefers the right option."""
    context, likelihoods = batch.ranked.context, []
    for option in context.example.option_ids:
        token_ids = torch.tensor(option, device=before_answer.device)
        total = token_log_likelihoods(before_answer[:, None], token_ids[:1]).sum(dim=1)
        if len(option) > 1:
            batch.cache.crop(end_of_question)
            first_position = context.cut.num_context + context.cut.num_question
            logits = run_alike(context.model, batch.cache, token_ids[:-1], first_position=first_position)
            total = total + token_log_likelihoods(logits, token_ids[1:]).sum(dim=1)
        likelihoods.append(total)
    rows = [score_options(context.example.sample, row) for row in torch.stack(likelihoods, dim=1).tolist()]
    return {name: [row[name] for row in rows] for name in rows[0]}
