"""Greedy answers of one contender's rows, decoded in batches that span contexts and examples.

A step of decoding reads all weights of the model whatever the number of rows, so rows wait until a batch is full.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvpolicy.benchmarks.scoring import answer_metric, score_answer
from kvpolicy.evaluation.caches import RowBatch, scores_of
from kvpolicy.evaluation.contexts import PreparedContext
from kvpolicy.inference.batching import rows_that_fit
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.decoding import decode_greedily
from kvpolicy.results.scores import Score


@dataclass(frozen=True, kw_only=True, eq=False)
class Unanswered:
    """Rows of one context that are about to answer.

    Attributes:
        place: Place of the example among those that are evaluated together.
        batch: The rows, with their caches up to the end of the question.
        first_tokens: The first token of each answer.
    """

    place: int
    batch: RowBatch
    first_tokens: Int[Tensor, "row"]

    @property
    def context(self) -> PreparedContext:
        """The context."""
        return self.batch.ranked.context

    @property
    def num_rows(self) -> int:
        """Answers to decode."""
        return len(self.batch.rows)

    def score(self, tokens: Sequence[int]) -> float:
        """How good an answer is."""
        text = self.context.model.tokenizer.decode(list(tokens)[: self.context.answer_tokens], skip_special_tokens=True)
        return score_answer(self.context.example.sample, text)

    def is_settled(self, tokens: Sequence[int]) -> bool:
        """Whether more tokens change nothing: a reference that was found stays found, while other scores may fall."""
        if len(tokens) >= self.context.answer_tokens:
            return True
        return answer_metric(self.context.example.sample.task) == "string_match" and self.score(tokens) == 1.0


def score_answers(waiting: Iterable[Unanswered]) -> Iterator[tuple[int, Score]]:
    """Decode the answers of rows as batches of them become full, and score each.

    Args:
        waiting: Rows of one contender; they are taken one after the other as room is made.

    Yields:
        The place of an example, and a score of an answer to it.
    """
    batch: list[Unanswered] = []
    for rows in waiting:
        if batch and not _go_together([*batch, rows]):
            yield from _answer(batch)
            batch = []
        batch.append(rows)
    if batch:
        yield from _answer(batch)


def _go_together(batch: Sequence[Unanswered]) -> bool:
    first = batch[0].context
    if first.model.change_tokens is not None and len({rows.context.model.sequence_tokens for rows in batch}) > 1:
        return False  # their rotary embeddings differ
    num_entries = max(rows.batch.cache.num_past_tokens + rows.context.answer_tokens for rows in batch)
    most = rows_that_fit(num_logits=first.whole.logits.shape[-1], num_entries=num_entries)
    return sum(rows.num_rows for rows in batch) <= most


def _answer(batch: Sequence[Unanswered]) -> Iterator[tuple[int, Score]]:
    most = max(rows.context.answer_tokens for rows in batch)
    owners = [rows for rows in batch for _ in range(rows.num_rows)]
    sizes = torch.tensor([row.kept.shape[1] for rows in batch for row in rows.batch.rows])
    order = sizes.argsort(descending=True, stable=True)  # those of similar size attend together
    cache = batch[0].batch.cache
    if len(batch) > 1:
        cache = CompactedCache.joined([rows.batch.cache for rows in batch], num_new_tokens=most)
        cache.keep_rows(order)
    first_tokens = torch.cat([rows.first_tokens for rows in batch])
    first_positions = [rows.context.cut.num_context + rows.context.cut.num_question for rows in owners]
    tokens = decode_greedily(
        max((rows.context.model for rows in batch), key=lambda model: model.sequence_tokens or 0),
        cache,
        first_tokens[order.to(first_tokens.device)],
        first_position=torch.tensor(first_positions)[order],
        max_new_tokens=most,
        is_settled=lambda place, answer: owners[order[place]].is_settled(answer),
    )
    answers = dict(zip(order.tolist(), tokens, strict=True))
    values = iter([rows.score(answers[place]) for place, rows in enumerate(owners)])
    for rows in batch:
        metric, of_rows = answer_metric(rows.context.example.sample.task), [next(values) for _ in rows.batch.rows]
        for score in scores_of(rows.batch.ranked, rows.batch.rows, metric, of_rows):
            yield rows.place, score
