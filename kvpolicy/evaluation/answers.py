"""Greedy answers of one contender's rows, decoded in batches that span contexts and examples.

A step of decoding reads all weights of the model whatever the number of rows, so rows wait until a batch is full.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvpolicy.benchmarks.scoring import answer_metric, score_answer
from kvpolicy.evaluation.caches import Row
from kvpolicy.evaluation.contexts import PreparedContext
from kvpolicy.inference.batching import rows_that_fit
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.decoding import decode_greedily


@dataclass(frozen=True, kw_only=True, eq=False)
class Unanswered:
    """Rows of one context that are about to answer.

    Attributes:
        place: Of the example among those that are evaluated together.
        context: The context.
        rows: The rows.
        cache: Their caches up to the end of the question, with room for the answer.
        first_tokens: What each predicts after the question.
        num_tokens: Tokens at which it is cut.
    """

    place: int
    context: PreparedContext
    rows: Sequence[Row]
    cache: CompactedCache
    first_tokens: Int[Tensor, "row"]
    num_tokens: int

    @property
    def metric(self) -> str:
        """The metric by which an answer is scored."""
        return answer_metric(self.context.continuation.example.sample.task)

    @property
    def first_position(self) -> int:
        """Original position of the first tokens."""
        cut = self.context.continuation.cut
        return cut.num_context + cut.num_question

    def score(self, tokens: Sequence[int]) -> float:
        """How good an answer is."""
        text = self.context.model.tokenizer.decode(list(tokens)[: self.num_tokens], skip_special_tokens=True)
        return score_answer(self.context.continuation.example.sample, text)

    def is_settled(self, tokens: Sequence[int]) -> bool:
        """Whether more tokens change nothing: a reference that was found stays found, while other scores may fall."""
        return len(tokens) >= self.num_tokens or (self.metric == "string_match" and self.score(tokens) == 1.0)


def score_answers(waiting: Iterable[Unanswered]) -> Iterator[tuple[Unanswered, list[float]]]:
    """Decode the answers of rows as batches of them become full, and score each.

    Args:
        waiting: Rows of one contender; they are taken one after the other as room is made.

    Yields:
        Rows, and the score of the answer of each.
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
    model = batch[0].context.model
    if model.change_tokens is not None and len({rows.context.model.sequence_tokens for rows in batch}) > 1:
        return False  # their rotary embeddings differ
    num_entries = max(rows.cache.num_past_tokens + rows.num_tokens for rows in batch)
    num_logits = batch[0].context.continuation.whole.logits.shape[-1]
    return sum(len(rows.rows) for rows in batch) <= rows_that_fit(num_logits=num_logits, num_entries=num_entries)


def _answer(batch: Sequence[Unanswered]) -> Iterator[tuple[Unanswered, list[float]]]:
    most = max(rows.num_tokens for rows in batch)
    owners = [rows for rows in batch for _ in rows.rows]
    sizes = torch.tensor([row.kept.shape[1] for rows in batch for row in rows.rows])
    order = sizes.argsort(descending=True, stable=True)  # those of similar size attend together
    cache = batch[0].cache
    if len(batch) > 1:
        cache = CompactedCache.joined([rows.cache for rows in batch], num_new_tokens=most)
        cache.keep_rows(order)
    first_tokens = torch.cat([rows.first_tokens for rows in batch])
    tokens = decode_greedily(
        max((rows.context.model for rows in batch), key=lambda model: model.sequence_tokens or 0),
        cache,
        first_tokens[order.to(first_tokens.device)],
        first_position=torch.tensor([owners[row].first_position for row in order]),
        max_new_tokens=most,
        is_settled=lambda place, answer: owners[order[place]].is_settled(answer),
    )
    answers = dict(zip(order.tolist(), tokens, strict=True))
    first = 0
    for rows in batch:
        yield rows, [rows.score(answers[first + place]) for place in range(len(rows.rows))]
        first += len(rows.rows)
