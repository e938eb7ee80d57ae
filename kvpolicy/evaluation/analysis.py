"""What the reward of training is worth on one example: after eviction, over budgets, and token by token.

Three questions, each measured on physically compacted caches: does future attention survive the eviction
(`kvpolicy.analysis.reward`), are the best sets of two budgets nested (`nestedness`), and does a token's score track
the harm of losing it (`leave_one_out`)? Harms can be as small as the rounding of bfloat16: use a model in float32.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.analysis.leave_one_out import choose_tokens, divergence_without, token_scores
from kvpolicy.analysis.nestedness import compare_nested_sets
from kvpolicy.analysis.ranks import spearman
from kvpolicy.analysis.reward import recompute_importance, reward_survival
from kvpolicy.evaluation.caches import row_batches
from kvpolicy.evaluation.contexts import PreparedContext, Ranked, prepare_contexts
from kvpolicy.evaluation.example import scores_of
from kvpolicy.evaluation.results import AnalysisResult, Contender, Finding, Score
from kvpolicy.methods.ranking import kept_positions
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.text.encoded_sample import EncodedSample

NUM_LEFT_OUT = 32
"""Tokens that leave by themselves, one at a time, in each example."""


def analyse_example(
    model: LanguageModel,
    example: EncodedSample,
    contenders: Sequence[Contender],
    budgets: Sequence[int],
    *,
    settings: Sequence[str],
    sample_seed: int = 0,
    num_left_out: int = NUM_LEFT_OUT,
) -> AnalysisResult:
    """Answer the three questions on one example.

    Args:
        model: The language model, in float32.
        example: The example, encoded.
        contenders: Methods with their seeds.
        budgets: Entries kept per KV head, in tokens.
        settings: `query_agnostic`, `query_aware` or both.
        sample_seed: Seed of this example.
        num_left_out: Tokens that leave by themselves.

    Raises:
        InputError: If a budget is above the context or below the always-kept tokens, or the example is too long.
    """
    contexts = prepare_contexts(
        model, example, contenders, settings=settings, num_following=len(example.answer_ids), seed=sample_seed
    )
    scores: list[Score] = []
    findings: list[Finding] = []
    for context in contexts:
        left_out = _LeftOut(context, num_left_out)
        for contender in contenders:
            if not contender.method.evicts:
                continue
            ranked = context.rank(contender)
            scores += _reward(context, ranked, budgets)
            findings += _leave_one_out(context, ranked, left_out)
            if contender.method.needs_importance:
                findings += _nestedness(context, contender, budgets)
    return AnalysisResult(scores=tuple(scores), findings=tuple(findings))


def _reward(context: PreparedContext, ranked: Ranked, budgets: Sequence[int]) -> Iterator[Score]:
    continuation, full = context.continuation, context.importance
    for batch in row_batches(ranked, budgets, num_new=continuation.cut.num_future, vocabulary=1):
        kept = [row.kept for row in batch]
        recomputed = _importance_of(context, kept)
        survived = [reward_survival(full, *pair) for pair in zip(recomputed, kept, strict=True)]
        yield from scores_of(batch, context.setting, "missed_mass", [entry.mean_missed_mass for entry in survived])
        orders = [(row, entry.mean_correlation) for row, entry in zip(batch, survived, strict=True)]
        defined = [(row, value) for row, value in orders if value is not None]
        yield from scores_of(
            [row for row, _ in defined], context.setting, "reward_correlation", [value for _, value in defined]
        )


def _importance_of(context: PreparedContext, kept: Sequence[Int[Tensor, "head _"]]) -> list[Float[Tensor, "head _"]]:
    """Importance of what some sets keep, on the caches that hold nothing else."""
    continuation = context.continuation
    return recompute_importance(
        context.model, continuation.whole, kept, continuation.token_ids, num_context=continuation.cut.num_context
    )


def _nestedness(context: PreparedContext, contender: Contender, budgets: Sequence[int]) -> Iterator[Finding]:
    """Of the best sets, so of the contender that knows true importance."""
    full = context.importance
    ascending = sorted(budgets)
    best = [kept_positions(full, budget) for budget in ascending]
    recomputed = _importance_of(context, best)
    for smaller, larger in combinations(range(len(ascending)), 2):
        nested = compare_nested_sets(full, recomputed[larger], best[larger], ascending[smaller])
        quantities = {"overlap": nested.overlap, "excess_missed_mass": nested.excess_missed_mass}
        for quantity, by_head in quantities.items():
            yield Finding(
                setting=context.setting,
                analysis="nestedness",
                quantity=quantity,
                method=contender.method.name,
                seed=contender.seed,
                budget=ascending[smaller],
                larger_budget=ascending[larger],
                value=float(by_head.mean()),
            )


class _LeftOut:
    """Some tokens of a context, and what the loss of each does to the predictions: the same for every contender."""

    def __init__(self, context: PreparedContext, count: int) -> None:
        continuation = context.continuation
        self.worth = context.importance.sum(dim=0)
        self.tokens = choose_tokens(self.worth, count, seed=context.seed)
        self.divergence = divergence_without(
            context.model,
            continuation.whole,
            self.tokens,
            continuation.token_ids[:-1],
            num_context=continuation.cut.num_context,
        )


def _leave_one_out(context: PreparedContext, ranked: Ranked, left_out: _LeftOut) -> Iterator[Finding]:
    contender = ranked.contender
    worth = left_out.worth if contender.method.needs_importance else token_scores(ranked.scores)
    value = float(spearman(worth[left_out.tokens], left_out.divergence))
    if not math.isnan(value):  # where scores or harms are all alike there is no order
        yield Finding(
            setting=context.setting,
            analysis="leave_one_out",
            quantity="spearman",
            method=contender.method.name,
            seed=contender.seed,
            budget=None,
            larger_budget=None,
            value=value,
        )
