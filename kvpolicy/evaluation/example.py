"""Contenders at all budgets on some examples, from one prefill of each.

The whole sequence (context, question, reference answer) is run once. In each setting the context's cache is ranked by
every method and physically compacted to every budget; what follows runs on the compacted caches as a batch: question
and answer in the query-agnostic setting, the answer alone in the query-aware one, whose context includes the question.
Contenders come one after the other, each on all examples, and nothing of one touches the figures of another.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.evaluation.answers import Unanswered, score_answers
from kvpolicy.evaluation.caches import Row, RowCaches
from kvpolicy.evaluation.contexts import PreparedContext, Ranked, prepare_contexts
from kvpolicy.evaluation.measure import measure_rows
from kvpolicy.evaluation.results import Contender, ExampleResult, HeadCosts, Score, TokenRanking
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.names import SETTINGS
from kvpolicy.objectives.cost import normalised_cost
from kvpolicy.text.encoded_sample import EncodedSample

MAX_HELD_BYTES = 2 * 2**30
"""Of keys and values of the examples that are held at once."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedExample:
    """An example, and what is asked of it.

    Attributes:
        encoded: The example.
        seed: Of the example, which the random method mixes with its own.
        generate: Whether to generate greedy answers for the metrics that judge them, which takes most of the time.
        keep_rankings: Whether to return every ranking of the whole context, token by token.
    """

    encoded: EncodedSample
    seed: int = 0
    generate: bool = True
    keep_rankings: bool = False


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
    """Measure all contenders at all budgets on one example, with the arguments of `evaluate_examples`."""
    asked = EvaluatedExample(encoded=example, seed=sample_seed, generate=generate, keep_rankings=keep_rankings)
    results = [
        result
        for _, (result,) in evaluate_examples(
            model,
            [asked],
            contenders,
            budgets,
            settings=settings,
            max_answer_tokens=max_answer_tokens,
            chunk_tokens=chunk_tokens,
        )
    ]
    return ExampleResult(
        scores=tuple(score for result in results for score in result.scores),
        head_costs=tuple(costs for result in results for costs in result.head_costs),
        rankings=tuple(ranking for result in results for ranking in result.rankings),
    )


def evaluate_examples(
    model: LanguageModel,
    examples: Iterable[EvaluatedExample],
    contenders: Sequence[Contender],
    budgets: Sequence[int],
    *,
    settings: Sequence[str] = SETTINGS,
    max_answer_tokens: int | None = None,
    chunk_tokens: int | None = None,
) -> Iterator[tuple[Contender, list[ExampleResult]]]:
    """Measure each contender at all budgets on some examples; as many of these are held at once as memory is for.

    Args:
        model: The language model.
        examples: The examples.
        contenders: Methods with their seeds.
        budgets: Entries kept per KV head, in tokens.
        settings: `query_agnostic`, `query_aware` or both.
        max_answer_tokens: Tokens at which an answer is cut, where its task allows more.
        chunk_tokens: Run the context in chunks of so many tokens and compress after each, with every method that
            ranks more than whole contexts; the others compress once.

    Yields:
        Each contender with its results on some consecutive examples, in their order; then on those after them.

    Raises:
        InputError: If a budget is above the context or below the always-kept tokens, or an example is too long.
    """
    for group in _groups(model, examples):
        prepared = [
            _prepare(model, example, contenders, settings, max_answer_tokens, place=place)
            for place, example in enumerate(group)
        ]
        for contender in contenders:
            results = [_Result() for _ in prepared]
            waiting = (
                unanswered
                for example, result in zip(prepared, results, strict=True)
                for unanswered in _measure(example, contender, budgets, chunk_tokens, result)
            )
            for rows, values in score_answers(waiting):
                results[rows.place].scores += scores_of(rows.rows, rows.context.setting, rows.metric, values)
            yield contender, [result.freeze() for result in results]


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


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """An example with its prefill.

    Attributes:
        place: Of the example among those that are held at once.
        asked: What is asked of the example.
        contexts: Its context in each setting.
        metrics: Of its task.
        answer_tokens: Tokens of a greedy answer; 0 for none.
    """

    place: int
    asked: EvaluatedExample
    contexts: Sequence[PreparedContext]
    metrics: tuple[str, ...]
    answer_tokens: int

    @property
    def num_following(self) -> int:
        """Tokens that run after the question, at most."""
        encoded = self.asked.encoded
        return max(len(encoded.answer_ids), self.answer_tokens, *map(len, encoded.option_ids))


@dataclass
class _Result:
    """What one contender has come to on one example so far."""

    scores: list[Score] = field(default_factory=list)
    head_costs: list[HeadCosts] = field(default_factory=list)
    rankings: list[TokenRanking] = field(default_factory=list)

    def freeze(self) -> ExampleResult:
        return ExampleResult(
            scores=tuple(self.scores), head_costs=tuple(self.head_costs), rankings=tuple(self.rankings)
        )


def _groups(model: LanguageModel, examples: Iterable[EvaluatedExample]) -> Iterator[list[EvaluatedExample]]:
    """Consecutive examples that are held at once."""
    token_bytes = 2 * model.spec.num_heads * model.spec.head_dim * model.dtype.itemsize
    group, held_bytes = list[EvaluatedExample](), 0
    for example in examples:
        encoded = example.encoded
        num_bytes = token_bytes * sum(map(len, (encoded.context_ids, encoded.question_ids, encoded.answer_ids)))
        if group and held_bytes + num_bytes > MAX_HELD_BYTES:
            yield group
            group, held_bytes = [], 0
        group.append(example)
        held_bytes += num_bytes
    if group:
        yield group


def _prepare(
    model: LanguageModel,
    asked: EvaluatedExample,
    contenders: Sequence[Contender],
    settings: Sequence[str],
    max_answer_tokens: int | None,
    *,
    place: int,
) -> _Prepared:
    sample = asked.encoded.sample
    info = task_info(sample.task)
    allowed = min(sample.max_new_tokens, max_answer_tokens or sample.max_new_tokens)
    answer_tokens = allowed if asked.generate and info.is_generated else 0
    prepared = _Prepared(place=place, asked=asked, contexts=(), metrics=info.metrics, answer_tokens=answer_tokens)
    contexts = prepare_contexts(
        model,
        asked.encoded,
        contenders,
        settings=settings,
        num_following=prepared.num_following,
        seed=asked.seed,
    )
    return replace(prepared, contexts=contexts)


def _measure(
    example: _Prepared,
    contender: Contender,
    budgets: Sequence[int],
    chunk_tokens: int | None,
    result: _Result,
) -> Iterator[Unanswered]:
    """Measure all but answers, into a result, and yield the rows that are to answer."""
    for context in example.contexts:
        num_new_tokens = context.continuation.cut.num_question + example.num_following
        caches = RowCaches(context=context, num_new_tokens=num_new_tokens, chunk_tokens=chunk_tokens)
        ranked = context.rank(contender)
        if contender.method.evicts:
            result.head_costs.append(_head_costs(ranked, context))
            result.rankings += [ranked.by_token(context.setting, budgets)] if example.asked.keep_rankings else []
        for batch in caches.of(ranked, budgets):
            measured = measure_rows(context.model, batch, context.continuation, example.metrics)
            for metric, values in measured.figures.items():
                result.scores += scores_of(batch.rows, context.setting, metric, values)
            if example.answer_tokens:
                yield Unanswered(
                    place=example.place,
                    context=context,
                    rows=batch.rows,
                    cache=batch.cache,
                    first_tokens=measured.before_answer.argmax(dim=-1),
                    num_tokens=example.answer_tokens,
                )


def _head_costs(ranked: Ranked, context: PreparedContext) -> HeadCosts:
    return HeadCosts(
        setting=context.setting,
        method=ranked.contender.method.name,
        seed=ranked.contender.seed,
        costs=normalised_cost(ranked.scores, context.importance),
    )
