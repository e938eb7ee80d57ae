"""Measure the worth of the training reward on one example: after eviction, over budgets, and token by token.

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
from kvpolicy.evaluation.caches import row_batches, scores_of
from kvpolicy.evaluation.contexts import PreparedContext, Ranked, prepare_contexts
from kvpolicy.evaluation.results import AnalysisResult, Contender, Finding
from kvpolicy.methods.ranking import kept_positions
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.results.scores import Score
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
    result = AnalysisResult()
    evicting = [contender for contender in contenders if contender.method.evicts]
    for context in prepare_contexts(model, example, contenders, settings=settings, seed=sample_seed):
        worth = context.importance.sum(dim=0)
        left_out = choose_tokens(worth, num_left_out, seed=context.seed)
        divergence = divergence_without(
            context.model, context.whole, left_out, context.future_ids[:-1], num_context=context.cut.num_context
        )
        for contender in evicting:
            ranked = context.rank(contender)
            knows_importance = contender.method.needs_importance
            result.scores += _reward(ranked, budgets)
            scores = worth if knows_importance else token_scores(ranked.scores)
            value = float(spearman(scores[left_out], divergence))
            if not math.isnan(value):  # where scores or harms are all alike there is no order
                finding = Finding(**ranked.source, analysis="leave_one_out", quantity="spearman", value=value)
                result.findings.append(finding)
            if knows_importance:
                result.findings += _nestedness(ranked, budgets)
    return result


def _reward(ranked: Ranked, budgets: Sequence[int]) -> Iterator[Score]:
    full = ranked.context.importance
    for rows in row_batches(ranked, budgets, num_logits=ranked.context.cut.num_future):
        kept = [row.kept for row in rows]
        survived = [
            reward_survival(full, *pair) for pair in zip(_importance_of(ranked.context, kept), kept, strict=True)
        ]
        yield from scores_of(ranked, rows, "missed_mass", [entry.mean_missed_mass for entry in survived])
        for row, entry in zip(rows, survived, strict=True):
            if entry.mean_correlation is not None:
                yield from scores_of(ranked, [row], "reward_correlation", [entry.mean_correlation])


def _importance_of(context: PreparedContext, kept: Sequence[Int[Tensor, "head _"]]) -> list[Float[Tensor, "head _"]]:
    """Importance of the entries of some sets, on the caches that hold nothing else."""
    return recompute_importance(
        context.model, context.whole, kept, context.future_ids, num_context=context.cut.num_context
    )


def _nestedness(ranked: Ranked, budgets: Sequence[int]) -> Iterator[Finding]:
    """Compare best sets, which only the contender that knows true importance has."""
    full, ascending = ranked.context.importance, sorted(budgets)
    best = [kept_positions(full, budget) for budget in ascending]
    recomputed = _importance_of(ranked.context, best)
    for smaller, larger in combinations(range(len(ascending)), 2):
        nested = compare_nested_sets(full, recomputed[larger], best[larger], ascending[smaller])
        quantities = {"overlap": nested.overlap, "excess_missed_mass": nested.excess_missed_mass}
        for quantity, by_head in quantities.items():
            yield Finding(
                **ranked.source,
                analysis="nestedness",
                quantity=quantity,
                value=float(by_head.mean()),
                budget=ascending[smaller],
                larger_budget=ascending[larger],
            )
