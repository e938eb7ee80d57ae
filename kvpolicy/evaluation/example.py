"""Contenders at all budgets on some examples, from one prefill of each.

The whole sequence (context, question, reference answer) is run once. In each setting the context's cache is ranked by
every method and physically compacted to every budget; what follows runs on the compacted caches as a batch: question
and answer in the query-agnostic setting, the answer alone in the query-aware one, whose context includes the question.
Contenders come one after the other, each on all examples, and nothing of one touches the figures of another.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.evaluation.answers import Unanswered, score_answers
from kvpolicy.evaluation.caches import RowBatch, compact_rows, scores_of
from kvpolicy.evaluation.contexts import PreparedContext, prepare_contexts
from kvpolicy.evaluation.measure import measure_rows
from kvpolicy.evaluation.results import Contender, ExampleResult, HeadCosts
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.names import SETTINGS
from kvpolicy.objectives.cost import normalised_cost
from kvpolicy.text.encoded_sample import EncodedSample

MAX_HELD_BYTES = 2 * 2**30
"""Bytes of keys and values of the examples that are held at once."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedExample:
    """An example, and how it is evaluated.

    Attributes:
        encoded: The example.
        seed: Seed of the example, which the random method mixes with its own.
        generate: Whether to generate greedy answers for the metrics of answers, which takes most of the time.
        keep_rankings: Whether to return every ranking of the whole context, token by token.
    """

    encoded: EncodedSample
    seed: int = 0
    generate: bool = True
    keep_rankings: bool = False

    def answer_tokens(self, most: int | None) -> int:
        """Tokens at which a greedy answer is cut, where the task allows more than `most`; 0 if there is none."""
        sample = self.encoded.sample
        is_answered = self.generate and task_info(sample.task).is_generated
        return min(sample.max_new_tokens, most or sample.max_new_tokens) if is_answered else 0


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
    merged = ExampleResult()
    for _, (result,) in evaluate_examples(
        model,
        [asked],
        contenders,
        budgets,
        settings=settings,
        max_answer_tokens=max_answer_tokens,
        chunk_tokens=chunk_tokens,
    ):
        merged.scores += result.scores
        merged.head_costs += result.head_costs
        merged.rankings += result.rankings
    return merged


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
            prepare_contexts(
                model,
                example.encoded,
                contenders,
                settings=settings,
                seed=example.seed,
                answer_tokens=example.answer_tokens(max_answer_tokens),
            )
            for example in group
        ]
        for contender in contenders:
            results = [ExampleResult() for _ in group]
            waiting = (
                Unanswered(place=place, batch=batch, first_tokens=before_answer.argmax(dim=-1))
                for place, (example, contexts) in enumerate(zip(group, prepared, strict=True))
                for batch, before_answer in _measure(
                    contexts, contender, budgets, chunk_tokens, results[place], keep_rankings=example.keep_rankings
                )
            )
            for place, score in score_answers(waiting):
                results[place].scores.append(score)
            yield contender, results


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


def _measure(
    contexts: Sequence[PreparedContext],
    contender: Contender,
    budgets: Sequence[int],
    chunk_tokens: int | None,
    result: ExampleResult,
    *,
    keep_rankings: bool,
) -> Iterator[tuple[RowBatch, Float[Tensor, "row vocab"]]]:
    """Measure all but answers, into a result; yield the rows that are to answer, and what each predicts first."""
    for context in contexts:
        ranked = context.rank(contender)
        if contender.method.evicts:
            costs = normalised_cost(ranked.scores, context.importance)
            result.head_costs.append(HeadCosts(**ranked.source, costs=costs))
            result.rankings += [ranked.by_token(budgets)] if keep_rankings else []
        for batch in compact_rows(ranked, budgets, chunk_tokens):
            figures, before_answer = measure_rows(batch)
            for metric, values in figures.items():
                result.scores += scores_of(ranked, batch.rows, metric, values)
            if context.answer_tokens:
                yield batch, before_answer
