"""All contenders at all budgets on one example, from one prefill.

The whole sequence (context, question, reference answer) is run once. In each setting the context's cache is ranked by
every method and physically compacted to every budget; what follows runs on the compacted caches as a batch: question
and answer in the query-agnostic setting, the answer alone in the query-aware one, whose context includes the question.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.cache import CompactedCache
from kvpolicy.evaluation.contenders import Ranked, prefill_once, rank_context
from kvpolicy.evaluation.continuation import Continuation
from kvpolicy.evaluation.measure import Wanted, measure_rows
from kvpolicy.evaluation.results import Contender, ExampleResult, HeadCosts, Score
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.objectives.cost import normalised_cost
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import SETTINGS, cut_sample

# A batch is limited by the logits of its new tokens (256 MB of float32) and by the cache entries that it holds.
_MAX_BATCH_LOGITS = 64 * 2**20
_MAX_BATCH_ENTRIES = 16 * 2**10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compacted variant of an example, and the budgets whose figures it gives."""

    contender: Contender
    budgets: tuple[int, ...]
    kept: Int[Tensor, "head kept"]


def evaluate_example(
    model: LanguageModel,
    example: EncodedSample,
    contenders: Sequence[Contender],
    budgets: Sequence[int],
    *,
    settings: Sequence[str] = SETTINGS,
    sample_seed: int = 0,
    generate: bool = True,
    max_answer_tokens: int | None = None,
) -> ExampleResult:
    """Measure all contenders at all budgets on one example.

    Args:
        model: The language model.
        example: The example, encoded.
        contenders: Methods with their seeds.
        budgets: Entries kept per KV head, in tokens.
        settings: `query_agnostic`, `query_aware` or both.
        sample_seed: Seed of this example, which the random method mixes with its own.
        generate: Whether to generate greedy answers for the metrics that judge them, which takes most of the time.
        max_answer_tokens: Tokens at which an answer is cut, where its task allows more.

    Raises:
        InputError: If a budget is above the context or below the always-kept tokens, or the example is too long.
    """
    cuts = [cut_sample(example, setting) for setting in settings]
    whole = prefill_once(model, example, contenders, cuts)
    wanted = _wanted(example, generate=generate, max_answer_tokens=max_answer_tokens)
    scores: list[Score] = []
    head_costs: list[HeadCosts] = []
    for cut in cuts:
        continuation = Continuation(example=example, cut=cut, whole=whole)
        ranked = rank_context(model, contenders, whole, cut, sample_seed=sample_seed)
        rows = [row for entry in ranked for row in rows_of(entry, budgets)]
        for batch in batches(rows, num_new=cut.num_future, vocabulary=whole.logits.shape[-1]):
            scores += _measure(model, continuation, batch, wanted)
        head_costs += [_head_costs(entry, cut.setting) for entry in ranked if entry.contender.method.evicts]
    return ExampleResult(scores=tuple(scores), head_costs=tuple(head_costs))


def rows_of(ranked: Ranked, budgets: Sequence[int]) -> list[Row]:
    """A row for every budget; a single one for the method that keeps everything."""
    contender = ranked.contender
    if not contender.method.evicts:
        return [Row(contender=contender, budgets=tuple(budgets), kept=ranked.kept(0))]
    return [Row(contender=contender, budgets=(budget,), kept=ranked.kept(budget)) for budget in budgets]


def batches(rows: Sequence[Row], *, num_new: int, vocabulary: int) -> Iterator[list[Row]]:
    """Rows of similar size together, so that little of a batch is padding."""
    most_rows = max(1, _MAX_BATCH_LOGITS // (num_new * vocabulary))
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: row.kept.shape[1], reverse=True):
        if batch and (len(batch) == most_rows or (len(batch) + 1) * batch[0].kept.shape[1] > _MAX_BATCH_ENTRIES):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def scores_of(rows: Sequence[Row], setting: str, metric: str, values: Sequence[float]) -> Iterator[Score]:
    """One figure of every row, at each of its budgets."""
    for row, value in zip(rows, values, strict=True):
        for budget in row.budgets:
            yield Score(
                setting=setting,
                method=row.contender.method.name,
                seed=row.contender.seed,
                budget=budget,
                metric=metric,
                value=value,
            )


def _wanted(example: EncodedSample, *, generate: bool, max_answer_tokens: int | None) -> Wanted:
    sample = example.sample
    info = task_info(sample.task)
    allowed = min(sample.max_new_tokens, max_answer_tokens or sample.max_new_tokens)
    return Wanted(metrics=info.metrics, answer_tokens=allowed if generate and info.is_generated else 0)


def _measure(model: LanguageModel, continuation: Continuation, rows: Sequence[Row], wanted: Wanted) -> Iterator[Score]:
    cut, whole = continuation.cut, continuation.whole
    longest_option = max(map(len, continuation.example.option_ids), default=0)
    cache = CompactedCache(
        whole.keys[:, : cut.num_context],
        whole.values[:, : cut.num_context],
        [row.kept for row in rows],
        num_kv_heads=whole.num_kv_heads,
        num_new_tokens=cut.num_question + max(cut.num_answer, longest_option, wanted.answer_tokens),
    )
    for metric, values in measure_rows(model, cache, continuation, wanted).items():
        yield from scores_of(rows, cut.setting, metric, values)


def _head_costs(ranked: Ranked, setting: str) -> HeadCosts:
    assert ranked.state.importance is not None
    return HeadCosts(
        setting=setting,
        method=ranked.contender.method.name,
        seed=ranked.contender.seed,
        costs=normalised_cost(ranked.scores, ranked.state.importance),
    )
