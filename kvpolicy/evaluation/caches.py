"""The compacted caches of one contender on one example, in batches: compressed once, or after every chunk.

A batch holds rows of one contender alone: how many rows run together changes the last bits of what a model computes in
bfloat16, and the figures of a contender must not depend on who else takes part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.evaluation.contexts import PreparedContext, Ranked
from kvpolicy.evaluation.results import Contender
from kvpolicy.inference.batching import rows_that_fit
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.streaming import StreamedCaches, StreamedRow
from kvpolicy.seeds import derive_seed


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


def row_batches(ranked: Ranked, budgets: Sequence[int], *, num_new: int, vocabulary: int) -> Iterator[list[Row]]:
    """The rows of one contender, those of similar size together, so that little of a batch is padding.

    Args:
        ranked: The contender's ranking.
        budgets: A row each; a single one for the method that keeps everything.
        num_new: Tokens that run on each row with their logits.
        vocabulary: Logits of a token.
    """
    contender = ranked.contender
    if contender.method.evicts:
        rows = [Row(contender=contender, budgets=(budget,), kept=ranked.kept(budget)) for budget in budgets]
    else:
        rows = [Row(contender=contender, budgets=tuple(budgets), kept=ranked.kept(0))]
    rows.sort(key=lambda row: row.kept.shape[1], reverse=True)
    while rows:
        size = rows_that_fit(num_logits=num_new * vocabulary, num_entries=rows[0].kept.shape[1])
        yield rows[:size]
        rows = rows[size:]


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
        context: What is compressed.
        num_new_tokens: Tokens for which caches have room.
        chunk_tokens: Length of the chunks after which methods compress that can; None compresses once.
    """

    context: PreparedContext
    num_new_tokens: int
    chunk_tokens: int | None

    def of(self, ranked: Ranked, budgets: Sequence[int]) -> Iterator[RowBatch]:
        """Batches of a contender's rows, each with its cache of the context."""
        method, continuation = ranked.contender.method, self.context.continuation
        sizes = {"num_new": continuation.cut.num_future, "vocabulary": continuation.whole.logits.shape[-1]}
        comes_in_chunks = method.evicts and method.recompression_obstacle is None
        for rows in row_batches(ranked, budgets, **sizes):
            if self.chunk_tokens is None or not comes_in_chunks:
                yield self._at_once(rows)
            else:
                yield self._in_chunks(rows, self.chunk_tokens)

    def _at_once(self, rows: Sequence[Row]) -> RowBatch:
        continuation, state = self.context.continuation, self.context.state
        cache = CompactedCache(
            state.keys,
            state.values,
            [row.kept for row in rows],
            num_kv_heads=state.num_kv_heads,
            num_new_tokens=self.num_new_tokens,
        )
        return RowBatch(rows=rows, cache=cache, after_context=continuation.full_logits[0].expand(len(rows), -1))

    def _in_chunks(self, rows: Sequence[Row], chunk_tokens: int) -> RowBatch:
        context = self.context.continuation.context_ids
        streamed = [
            StreamedRow(
                method=row.contender.method,
                budget=row.budgets[0],
                seed=derive_seed(self.context.seed, row.contender.seed),
            )
            for row in rows
        ]
        caches = StreamedCaches(self.context.model, streamed, interval_tokens=min(chunk_tokens, len(context)))
        shape = (len(rows), len(context))
        positions = torch.arange(len(context)).expand(shape)
        last = caches.run(self.context.model, context.expand(shape), positions, num_logits=1)[:, -1]
        return RowBatch(rows=rows, cache=caches.finish(self.num_new_tokens), after_context=last)
