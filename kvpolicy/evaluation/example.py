"""All contenders at all budgets on one example, from one prefill.

The whole sequence (context, question, reference answer) is run once. In each setting the context's cache is ranked by
every method and physically compacted to every budget; what follows runs on the compacted caches as a batch: question
and answer in the query-agnostic setting, the answer alone in the query-aware one, whose context includes the question.
"""

from collections.abc import Iterator, Sequence

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.evaluation.caches import Row, RowCaches
from kvpolicy.evaluation.contexts import PreparedContext, Ranked, prepare_contexts
from kvpolicy.evaluation.continuation import Continuation
from kvpolicy.evaluation.measure import Wanted, measure_rows
from kvpolicy.evaluation.results import Contender, ExampleResult, HeadCosts, RankedContext, Score
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.objectives.cost import normalised_cost
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import SETTINGS


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
    chunk_tokens: int | None = None,
    keep_rankings: bool = False,
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
        chunk_tokens: Run the context in chunks of so many tokens and compress after each, with every method that
            ranks more than whole contexts; the others compress once.
        keep_rankings: Whether to return every ranking of the whole context, token by token.

    Raises:
        InputError: If a budget is above the context or below the always-kept tokens, or the example is too long.
    """
    wanted = _wanted(example, generate=generate, max_answer_tokens=max_answer_tokens)
    contexts = prepare_contexts(
        model,
        example,
        contenders,
        settings=settings,
        num_following=max(len(example.answer_ids), wanted.answer_tokens, *map(len, example.option_ids)),
        seed=sample_seed,
    )
    scores: list[Score] = []
    head_costs: list[HeadCosts] = []
    kept: list[RankedContext] = []
    for context in contexts:
        num_new_tokens = _num_new_tokens(context.continuation, wanted)
        caches = RowCaches(context=context, num_new_tokens=num_new_tokens, chunk_tokens=chunk_tokens)
        rankings = []
        for contender in contenders:
            ranked = context.rank(contender)
            for batch in caches.of(ranked, budgets):
                for metric, values in measure_rows(context.model, batch, context.continuation, wanted).items():
                    scores += scores_of(batch.rows, context.setting, metric, values)
            if contender.method.evicts:
                head_costs.append(_head_costs(ranked, context))
                rankings += [ranked.by_token(budgets)] if keep_rankings else []
        if keep_rankings:
            importance = context.importance.cpu()
            kept.append(RankedContext(setting=context.setting, importance=importance, rankings=tuple(rankings)))
    return ExampleResult(scores=tuple(scores), head_costs=tuple(head_costs), contexts=tuple(kept))


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


def _num_new_tokens(continuation: Continuation, wanted: Wanted) -> int:
    cut, options = continuation.cut, continuation.example.option_ids
    return cut.num_question + max(cut.num_answer, wanted.answer_tokens, *map(len, options))


def _head_costs(ranked: Ranked, context: PreparedContext) -> HeadCosts:
    return HeadCosts(
        setting=context.setting,
        method=ranked.contender.method.name,
        seed=ranked.contender.seed,
        costs=normalised_cost(ranked.scores, context.importance),
    )
