"""The compacted caches of one example, in batches: compressed once after its context, or after every chunk of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.batching import rows_that_fit
from kvpolicy.cache import CompactedCache
from kvpolicy.evaluation.contenders import Ranked
from kvpolicy.evaluation.continuation import Continuation
from kvpolicy.evaluation.results import Contender
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.seeds import derive_seed
from kvpolicy.streaming import StreamedCaches, StreamedRow


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compacted variant of an example.

    Attributes:
        contender: Whose it is.
        budgets: Those whose figures it gives.
        kept: What is kept of the whole context.
    """

    contender: Contender
    budgets: tuple[int, ...]
    kept: Int[Tensor, "head kept"]


def rows_of(ranked: Ranked, budgets: Sequence[int]) -> list[Row]:
    """A row for every budget; a single one for the method that keeps everything."""
    contender = ranked.contender
    if not contender.method.evicts:
        return [Row(contender=contender, budgets=tuple(budgets), kept=ranked.kept(0))]
    return [Row(contender=contender, budgets=(budget,), kept=ranked.kept(budget)) for budget in budgets]


def batches(rows: Sequence[Row], *, num_new: int, vocabulary: int) -> Iterator[list[Row]]:
    """Rows of similar size together, so that little of a batch is padding."""
    ordered = sorted(rows, key=lambda row: row.kept.shape[1], reverse=True)
    while ordered:
        size = rows_that_fit(num_logits=num_new * vocabulary, num_entries=ordered[0].kept.shape[1])
        yield ordered[:size]
        ordered = ordered[size:]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBatch:
    """Rows with their caches of the context.

    Attributes:
        rows: The rows.
        cache: Their caches.
        after_context: What each predicts after the context's last token. That token runs before the last compression:
            on the full cache, or where contexts come in chunks, on what the chunks before it left.
    """

    rows: Sequence[Row]
    cache: CompactedCache
    after_context: Float[Tensor, "row vocab"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowCaches:
    """Makes the caches of rows.

    Attributes:
        model: The language model.
        continuation: The example.
        num_new_tokens: Tokens for which caches have room.
        chunk_tokens: Length of the chunks after which rows compress that can; None compresses all rows once.
        seed: Of the example.
    """

    model: LanguageModel
    continuation: Continuation
    num_new_tokens: int
    chunk_tokens: int | None
    seed: int

    def of(self, rows: Sequence[Row]) -> Iterator[RowBatch]:
        """Batches of rows, each with its cache of the context."""
        sizes = {"num_new": self.continuation.cut.num_future, "vocabulary": self.continuation.whole.logits.shape[-1]}
        for batch in batches([row for row in rows if not self._is_chunked(row)], **sizes):
            yield self._at_once(batch)
        if self.chunk_tokens is not None:
            for batch in batches([row for row in rows if self._is_chunked(row)], **sizes):
                yield self._in_chunks(batch, self.chunk_tokens)

    def _is_chunked(self, row: Row) -> bool:
        method = row.contender.method
        return self.chunk_tokens is not None and method.evicts and method.recompression_obstacle is None

    def _at_once(self, rows: Sequence[Row]) -> RowBatch:
        n, whole = self.continuation.cut.num_context, self.continuation.whole
        cache = CompactedCache(
            whole.keys[:, :n],
            whole.values[:, :n],
            [row.kept for row in rows],
            num_kv_heads=whole.num_kv_heads,
            num_new_tokens=self.num_new_tokens,
        )
        return RowBatch(rows=rows, cache=cache, after_context=self.continuation.full_logits[0].expand(len(rows), -1))

    def _in_chunks(self, rows: Sequence[Row], chunk_tokens: int) -> RowBatch:
        context = self.continuation.context_ids
        streamed = [
            StreamedRow(
                method=row.contender.method, budget=row.budgets[0], seed=derive_seed(self.seed, row.contender.seed)
            )
            for row in rows
        ]
        caches = StreamedCaches(self.model, streamed, interval_tokens=min(chunk_tokens, len(context)))
        shape = (len(rows), len(context))
        positions = torch.arange(len(context)).expand(shape)
        last = caches.run(self.model, context.expand(shape), positions, num_logits=1)[:, -1]
        return RowBatch(rows=rows, cache=caches.finish(self.num_new_tokens), after_context=last)
