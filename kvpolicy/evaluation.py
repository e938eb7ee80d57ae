"""Judging every method at every budget on one example, from one prefill (DESIGN: evaluation protocol).

The whole sequence (context, question, reference answer) is run once. In each setting the context's cache is ranked by
every method and physically compacted to every budget; what follows runs on the compacted caches as a batch: question
and answer in the query-agnostic setting, the answer alone in the query-aware one, whose context includes the question.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.importance import importance
from kvpolicy.attention.prefill import Prefill, prefill
from kvpolicy.benchmarks.scoring import score_answer
from kvpolicy.cache import CompactedCache
from kvpolicy.decoding import decode_greedily
from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, Method
from kvpolicy.methods.registry import method_names, method_type
from kvpolicy.metrics import kl_divergence
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.objectives.cost import normalised_cost
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import SETTINGS, Cut, check_setting, cut_sample
from kvpolicy.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS, kept_positions
from kvpolicy.seeds import derive_seed

# A batch is limited by the logits of its new tokens (256 MB of float32) and by the cache entries that it holds.
_MAX_BATCH_LOGITS = 64 * 2**20
_MAX_BATCH_ENTRIES = 16 * 2**10


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is judged.

    Attributes:
        methods: Names of methods; `full` and `oracle` always take part.
        budgets: Entries kept per KV head, in tokens, ascending.
        settings: `query_agnostic`, `query_aware` or both.
        num_samples: Samples of each task, of the test split.
        num_generated: How many of these are also answered, for `string_match`.
        max_answer_tokens: Tokens at which an answer is cut, where the task allows more; None leaves it to the task.
        num_random_seeds: Seeds of the random method.
        num_resamples: Bootstrap resamples.
        confidence: Of the intervals.
        examples_per_shard: Examples that are judged and committed at once.
    """

    methods: tuple[str, ...] = tuple(method_names())
    budgets: tuple[int, ...] = (64, 96, 128, 192, 256, 384, 512)
    settings: tuple[str, ...] = SETTINGS
    num_samples: int = 5
    num_generated: int = 2
    max_answer_tokens: int | None = None
    num_random_seeds: int = 1
    num_resamples: int = 2000
    confidence: float = 0.95
    examples_per_shard: int = 6

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: Naming each wrong field, what was got and what was expected.
        """
        for method in self.methods:
            method_type(method)
        for setting in self.settings:
            check_setting(setting)
        always = NUM_SINK_TOKENS + NUM_RECENT_TOKENS
        problems = [
            f"budget {budget} is below the {always} tokens that are always kept"
            for budget in self.budgets
            if budget < always
        ]
        problems += [
            f"{name} is empty, expected at least one"
            for name in ("methods", "budgets", "settings")
            if not getattr(self, name)
        ]
        problems += [
            f"{name} has a value twice"
            for name in ("methods", "budgets", "settings")
            if len(set(getattr(self, name))) < len(getattr(self, name))
        ]
        problems += [
            f"{name} is {getattr(self, name)}, expected at least {least}"
            for name, least in {
                "num_samples": 1,
                "num_generated": 0,
                "num_random_seeds": 1,
                "num_resamples": 100,
                "examples_per_shard": 1,
            }.items()
            if getattr(self, name) < least
        ]
        if self.num_generated > self.num_samples:
            problems.append(f"num_generated is {self.num_generated}, expected at most num_samples ({self.num_samples})")
        if self.max_answer_tokens is not None and self.max_answer_tokens < 1:
            problems.append(f"max_answer_tokens is {self.max_answer_tokens}, expected at least 1")
        if not 0 < self.confidence < 1:
            problems.append(f"confidence is {self.confidence}, expected between 0 and 1")
        if problems:
            raise InputError("evaluate: " + "; ".join(problems))

    @property
    def contenders(self) -> tuple[str, ...]:
        """All methods that take part, in the order of tables."""
        return tuple(name for name in method_names() if name in {*self.methods, "full", "oracle"})

    def check_context(self, num_tokens: int, sample_id: str) -> None:
        """Check that every budget fits in a context.

        Raises:
            InputError: Naming the largest budget and the context.
        """
        if max(self.budgets) > num_tokens:
            raise InputError(
                f"evaluate: budget {max(self.budgets)} is above the context of sample {sample_id}, which has "
                f"{num_tokens} tokens: choose smaller budgets or longer prompts (length_tokens)"
            )


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method as it takes part: with the seed that its policy or its draws come from."""

    method: Method
    seed: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """One figure of one example."""

    setting: str
    method: str
    seed: int
    budget: int
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class HeadCosts:
    """What one contender's ranking of one example costs every KV head, normalised (1.0 is perfect)."""

    setting: str
    method: str
    seed: int
    costs: Float[Tensor, "head"]


@dataclass(frozen=True, kw_only=True)
class ExampleResult:
    """All figures of one example."""

    scores: tuple[Score, ...]
    head_costs: tuple[HeadCosts, ...]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One compacted variant of the example, and the budgets whose figures it gives."""

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
        generate: Whether to generate greedy answers for `string_match`, which takes most of the time.
        max_answer_tokens: Tokens at which an answer is cut, where its task allows more.

    Raises:
        InputError: If a budget is above the context or below the always-kept tokens, or the example is too long.
    """
    whole, cuts = _prefill_once(model, example, contenders, settings)
    allowed = example.sample.max_new_tokens
    answer_tokens = min(allowed, max_answer_tokens or allowed) if generate else 0
    scores: list[Score] = []
    head_costs: list[HeadCosts] = []
    for cut in cuts:
        state = _cache_state(whole, cut)
        rows: list[_Row] = []
        for contender in contenders:
            if contender.method.evicts:
                seeded = replace(state, seed=derive_seed(sample_seed, contender.seed))
                ranked, costs = _rank(contender, seeded, budgets, cut.setting)
                rows += ranked
                head_costs.append(costs)
            else:
                everything = torch.arange(cut.num_context).expand(whole.keys.shape[0], -1)
                rows.append(_Row(contender=contender, budgets=tuple(budgets), kept=everything))
        for batch in _batches(rows, num_new=cut.num_future, vocabulary=whole.logits.shape[-1]):
            scores += _measure(model, example, whole, cut, batch, answer_tokens=answer_tokens)
    return ExampleResult(scores=tuple(scores), head_costs=tuple(head_costs))


def _prefill_once(
    model: LanguageModel, example: EncodedSample, contenders: Sequence[Contender], settings: Sequence[str]
) -> tuple[Prefill, list[Cut]]:
    cuts = [cut_sample(example, setting) for setting in settings]
    needed = [contender.method.num_queries for contender in contenders]
    token_ids = torch.tensor(example.context_ids + example.question_ids + example.answer_ids)
    num_tokens, num_future = len(token_ids), max(cut.num_future for cut in cuts)
    most = num_tokens if None in needed else max((count for count in needed if count is not None), default=0)
    whole = prefill(model, token_ids, num_queries=min(num_tokens, most + num_future), num_logits=num_future + 1)
    return whole, cuts


def _cache_state(whole: Prefill, cut: Cut) -> CacheState:
    """The context's part of the prefill, as views, with its true importance."""
    n = cut.num_context
    return CacheState(
        keys=whole.keys[:, :n],
        values=whole.values[:, :n],
        queries=whole.queries_before(n, n),
        positions=torch.arange(n, device=whole.keys.device)[None],
        num_kv_heads=whole.num_kv_heads,
        scaling=whole.scaling,
        importance=importance(whole, num_context=n, num_future=cut.num_future),
    )


def _rank(
    contender: Contender, state: CacheState, budgets: Sequence[int], setting: str
) -> tuple[list[_Row], HeadCosts]:
    scores = contender.method.score(state)
    assert state.importance is not None
    rows = [_Row(contender=contender, budgets=(budget,), kept=kept_positions(scores, budget)) for budget in budgets]
    costs = normalised_cost(scores, state.importance)
    return rows, HeadCosts(setting=setting, method=contender.method.name, seed=contender.seed, costs=costs)


def _batches(rows: Sequence[_Row], *, num_new: int, vocabulary: int) -> Iterator[list[_Row]]:
    """Rows of similar size together, so that little of a batch is padding."""
    most_rows = max(1, _MAX_BATCH_LOGITS // (num_new * vocabulary))
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: row.kept.shape[1], reverse=True):
        if batch and (len(batch) == most_rows or (len(batch) + 1) * batch[0].kept.shape[1] > _MAX_BATCH_ENTRIES):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _measure(
    model: LanguageModel, example: EncodedSample, whole: Prefill, cut: Cut, rows: Sequence[_Row], *, answer_tokens: int
) -> list[Score]:
    """Fidelity of a batch of rows under the reference continuation, and their own greedy answers."""
    sample = example.sample
    n, num_question, num_answer = cut.num_context, cut.num_question, cut.num_answer
    cache = CompactedCache(
        whole.keys[:, :n],
        whole.values[:, :n],
        [row.kept for row in rows],
        num_kv_heads=whole.num_kv_heads,
        num_new_tokens=num_question + max(num_answer, answer_tokens),
    )
    num_kept = cache.num_past_tokens
    # The last answer token predicts nothing that the reference knows.
    future = torch.tensor((example.context_ids + example.question_ids + example.answer_ids)[n:-1])
    positions = n + torch.arange(len(future))
    full_logits = whole.logits[-len(future) - 1 : -1]
    logits = cache.run(model, future.expand(len(rows), -1), positions.expand(len(rows), -1), num_logits=len(future))
    divergence = kl_divergence(full_logits, logits)
    of_answer = divergence[:, max(0, num_question - 1) :]
    figures = {"kl": divergence.mean(dim=1).tolist(), "kl_answer": of_answer.mean(dim=1).tolist()}
    if answer_tokens:
        cache.crop(num_kept + num_question)
        before_answer = (
            logits[:, num_question - 1] if num_question else whole.logits[-num_answer - 1].expand(len(rows), -1)
        )
        answers = decode_greedily(
            model,
            cache,
            before_answer.argmax(dim=-1),
            first_position=n + num_question,
            max_new_tokens=answer_tokens,
            is_settled=lambda tokens: score_answer(sample, model.tokenizer.decode(tokens)) == 1.0,
        )
        figures["string_match"] = [score_answer(sample, model.tokenizer.decode(answer)) for answer in answers]
    return [
        Score(
            setting=cut.setting,
            method=row.contender.method.name,
            seed=row.contender.seed,
            budget=budget,
            metric=metric,
            value=values[index],
        )
        for metric, values in figures.items()
        for index, row in enumerate(rows)
        for budget in row.budgets
    ]
