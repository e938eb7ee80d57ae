"""All contenders at all budgets on one example, from one prefill.

The whole sequence (context, question, reference answer) is run once. In each setting the context's cache is ranked by
every method and physically compacted to every budget; what follows runs on the compacted caches as a batch: question
and answer in the query-agnostic setting, the answer alone in the query-aware one, whose context includes the question.
"""

from collections.abc import Iterator, Sequence

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.evaluation.caches import Row, RowCaches, rows_of
from kvpolicy.evaluation.contenders import Ranked, prefill_once, rank_context, token_rankings
from kvpolicy.evaluation.continuation import Continuation
from kvpolicy.evaluation.measure import Wanted, measure_rows
from kvpolicy.evaluation.results import Contender, ExampleResult, HeadCosts, RankedContext, Score
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.objectives.cost import normalised_cost
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import SETTINGS, cut_sample


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
    cuts = [cut_sample(example, setting) for setting in settings]
    wanted = _wanted(example, generate=generate, max_answer_tokens=max_answer_tokens)
    follows = max(len(example.answer_ids), wanted.answer_tokens, *map(len, example.option_ids))
    num_prompt = len(example.context_ids) + len(example.question_ids)
    model = model.for_answer(num_prompt, follows, sample_id=example.sample.sample_id)
    whole = prefill_once(model, example, contenders, cuts)
    scores: list[Score] = []
    head_costs: list[HeadCosts] = []
    contexts: list[RankedContext] = []
    for cut in cuts:
        continuation = Continuation(example=example, cut=cut, whole=whole)
        ranked = rank_context(model, contenders, whole, cut, sample_seed=sample_seed)
        rows = [row for entry in ranked for row in rows_of(entry, budgets)]
        caches = RowCaches(
            model=model,
            continuation=continuation,
            num_new_tokens=_num_new_tokens(continuation, wanted),
            chunk_tokens=chunk_tokens,
            seed=sample_seed,
        )
        for batch in caches.of(rows):
            for metric, values in measure_rows(model, batch, continuation, wanted).items():
                scores += scores_of(batch.rows, cut.setting, metric, values)
        head_costs += [_head_costs(entry, cut.setting) for entry in ranked if entry.contender.method.evicts]
        if keep_rankings:
            contexts.append(token_rankings(ranked, cut.setting, budgets))
    return ExampleResult(scores=tuple(scores), head_costs=tuple(head_costs), contexts=tuple(contexts))


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


def _head_costs(ranked: Ranked, setting: str) -> HeadCosts:
    assert ranked.state.importance is not None
    return HeadCosts(
        setting=setting,
        method=ranked.contender.method.name,
        seed=ranked.contender.seed,
        costs=normalised_cost(ranked.scores, ranked.state.importance),
    )
