"""The compacted caches of one contender on one example, in batches: compressed once, or after every chunk.

A batch holds rows of one contender alone: how many rows run together changes the last bits of what a model computes in
bfloat16, and the figures of a contender must not depend on who else takes part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.evaluation.contexts import Ranked
from kvpolicy.inference.batching import rows_that_fit
from kvpolicy.inference.cache import CompactedCache, run_alike
from kvpolicy.inference.streaming import StreamedCaches, StreamedRow
from kvpolicy.results.scores import Score


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compacted variant of an example.

    Attributes:
        budgets: Budgets whose figures it gives.
        kept: Entries of the whole context that it keeps.
    """

    budgets: tuple[int, ...]
    kept: Int[Tensor, "head kept"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBatch:
    """Rows of one ranking with their caches of the context.

    Attributes:
        ranked: The ranking.
        rows: The rows.
        cache: Their caches, with room for everything that follows.
        after_context: Predictions of each after the context's last token, which runs before the last compression:
            on the full cache, or where contexts come in chunks, on what the chunks before it left.
    """

    ranked: Ranked
    rows: Sequence[Row]
    cache: CompactedCache
    after_context: Float[Tensor, "row vocab"]


def scores_of(ranked: Ranked, rows: Sequence[Row], metric: str, values: Sequence[float]) -> Iterator[Score]:
    """One figure of every row, at each of its budgets."""
    for row, value in zip(rows, values, strict=True):
        for budget in row.budgets:
            yield Score(**ranked.source, budget=budget, metric=metric, value=value)


def row_batches(ranked: Ranked, budgets: Sequence[int], *, num_logits: int) -> Iterator[list[Row]]:
    """The rows of one contender, those of similar size together, so that little of a batch is padding.

    Args:
        ranked: The contender's ranking.
        budgets: A row each; a single one for the method that keeps everything.
        num_logits: Logits of all tokens that run on each row.
    """
    each = [(budget,) for budget in budgets] if ranked.contender.method.evicts else [tuple(budgets)]
    rows = [Row(budgets=of_row, kept=ranked.kept(of_row[0])) for of_row in each]
    rows.sort(key=lambda row: row.kept.shape[1], reverse=True)
    while rows:
        size = rows_that_fit(num_logits=num_logits, num_entries=rows[0].kept.shape[1])
        yield rows[:size]
        rows = rows[size:]


def compact_rows(ranked: Ranked, budgets: Sequence[int], chunk_tokens: int | None) -> Iterator[RowBatch]:
    """Batches of a contender's rows, each with its caches of the context.

    Args:
        ranked: The contender's ranking.
        budgets: Entries kept per KV head, in tokens.
        chunk_tokens: Length of the chunks after which methods compress that can; None compresses once.
    """
    method, context = ranked.contender.method, ranked.context
    comes_in_chunks = method.evicts and method.recompression_obstacle is None
    for rows in row_batches(ranked, budgets, num_logits=context.cut.num_future * context.whole.logits.shape[-1]):
        if chunk_tokens is None or not comes_in_chunks:
            yield _compact_at_once(ranked, rows)
        else:
            yield _compact_in_chunks(ranked, rows, chunk_tokens)


def _compact_at_once(ranked: Ranked, rows: Sequence[Row]) -> RowBatch:
    context, state = ranked.context, ranked.context.state
    cache = CompactedCache(
        state.keys,
        state.values,
        [row.kept for row in rows],
        num_kv_heads=state.num_kv_heads,
        num_new_tokens=context.num_following_tokens,
    )
    return RowBatch(ranked=ranked, rows=rows, cache=cache, after_context=context.full_logits[0].expand(len(rows), -1))


def _compact_in_chunks(ranked: Ranked, rows: Sequence[Row], chunk_tokens: int) -> RowBatch:
    context, method = ranked.context, ranked.contender.method
    streamed = [StreamedRow(method=method, budget=row.budgets[0], seed=ranked.state.seed) for row in rows]
    caches = StreamedCaches(context.model, streamed, interval_tokens=min(chunk_tokens, context.cut.num_context))
    last = run_alike(context.model, caches, context.context_ids, first_position=0, num_logits=1)[:, -1]
    cache = caches.finish(context.num_following_tokens)
    return RowBatch(ranked=ranked, rows=rows, cache=cache, after_context=last)
