"""What is measured on a batch of compacted caches: fidelity, perplexity, the choice of an option, greedy answers.

All of it runs on the same caches: question and reference answer first, then, the answer forgotten, every option in
turn, then the model's own answer. `kvpolicy.metrics` says what each figure means.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.benchmarks.scoring import score_answer, score_options
from kvpolicy.cache import CompactedCache
from kvpolicy.decoding import decode_greedily
from kvpolicy.evaluation.caches import RowBatch
from kvpolicy.evaluation.continuation import Continuation
from kvpolicy.metrics import GENERATED_METRICS, kl_divergence, token_log_likelihoods
from kvpolicy.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is measured besides fidelity.

    Attributes:
        metrics: Of the sample's task.
        answer_tokens: Tokens of a greedy answer; 0 for none.
    """

    metrics: tuple[str, ...]
    answer_tokens: int


def measure_rows(
    model: LanguageModel, batch: RowBatch, continuation: Continuation, wanted: Wanted
) -> dict[str, list[float]]:
    """Run what follows the context on every row of a batch.

    Args:
        model: The language model.
        batch: Rows whose caches of the context have room for what follows.
        continuation: What follows.
        wanted: What to measure.

    Returns:
        Metric to one figure a row.
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
    if "perplexity" in wanted.metrics:
        figures["perplexity"] = _perplexity(continuation, torch.cat([batch.after_context[:, None], logits], dim=1))
    before_answer = logits[:, cut.num_question - 1] if cut.num_question else batch.after_context
    end_of_question = num_kept + cut.num_question
    if continuation.example.option_ids:
        figures |= _option_figures(model, cache, continuation, before_answer, end_of_question)
    if wanted.answer_tokens:
        cache.crop(end_of_question)
        figures |= _answer_figures(model, cache, continuation, before_answer, wanted)
    return figures


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


def _answer_figures(
    model: LanguageModel,
    cache: CompactedCache,
    continuation: Continuation,
    before_answer: Float[Tensor, "row vocab"],
    wanted: Wanted,
) -> dict[str, list[float]]:
    """How good each row's own greedy answer is."""
    sample = continuation.example.sample

    def score(tokens: list[int]) -> float:
        return score_answer(sample, model.tokenizer.decode(tokens, skip_special_tokens=True))

    name = next(metric for metric in wanted.metrics if metric in GENERATED_METRICS)
    answers = decode_greedily(
        model,
        cache,
        before_answer.argmax(dim=-1),
        first_position=continuation.cut.num_context + continuation.cut.num_question,
        max_new_tokens=wanted.answer_tokens,
        # A reference that was found stays found; other scores may fall again.
        is_settled=lambda tokens: name == "string_match" and score(tokens) == 1.0,
    )
    return {name: [score(answer) for answer in answers]}
