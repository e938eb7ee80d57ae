"""What the reward of training is worth on one example: after eviction, over budgets, and token by token.

Three questions, each measured on physically compacted caches: does future attention survive the eviction
(`kvpolicy.analysis.reward`), are the best sets of two budgets nested (`nestedness`), and does a token's score track
the harm of losing it (`leave_one_out`)? Harms can be as small as the rounding of bfloat16: use a model in float32.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from kvpolicy.analysis.leave_one_out import choose_tokens, divergence_without, token_scores
from kvpolicy.analysis.nestedness import compare_nested_sets
from kvpolicy.analysis.ranks import spearman
from kvpolicy.analysis.reward import recompute_importance, reward_survival
from kvpolicy.evaluation.caches import Row, batches, rows_of
from kvpolicy.evaluation.contenders import Ranked, prefill_once, rank_context
from kvpolicy.evaluation.continuation import Continuation
from kvpolicy.evaluation.example import scores_of
from kvpolicy.evaluation.results import AnalysisResult, Contender, Finding, Score
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import cut_sample
from kvpolicy.ranking import kept_positions

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
    cuts = [cut_sample(example, setting) for setting in settings]
    num_prompt = len(example.context_ids) + len(example.question_ids)
    model = model.for_answer(num_prompt, len(example.answer_ids), sample_id=example.sample.sample_id)
    whole = prefill_once(model, example, contenders, cuts)
    scores: list[Score] = []
    findings: list[Finding] = []
    for cut in cuts:
        continuation = Continuation(example=example, cut=cut, whole=whole)
        ranked = [
            entry
            for entry in rank_context(model, contenders, whole, cut, sample_seed=sample_seed)
            if entry.contender.method.evicts
        ]
        scores += _reward(model, continuation, [row for entry in ranked for row in rows_of(entry, budgets)], ranked)
        findings += _nestedness(model, continuation, ranked[0], budgets)
        findings += _leave_one_out(model, continuation, ranked, num_left_out, seed=sample_seed)
    return AnalysisResult(scores=tuple(scores), findings=tuple(findings))


def _reward(
    model: LanguageModel, continuation: Continuation, rows: Sequence[Row], ranked: Sequence[Ranked]
) -> Iterator[Score]:
    cut, whole = continuation.cut, continuation.whole
    full = ranked[0].state.importance
    assert full is not None
    for batch in batches(rows, num_new=cut.num_future, vocabulary=1):
        kept = [row.kept for row in batch]
        recomputed = recompute_importance(model, whole, kept, continuation.token_ids, num_context=cut.num_context)
        survived = [reward_survival(full, *pair) for pair in zip(recomputed, kept, strict=True)]
        yield from scores_of(batch, cut.setting, "missed_mass", [entry.mean_missed_mass for entry in survived])
        orders = [(row, entry.mean_correlation) for row, entry in zip(batch, survived, strict=True)]
        defined = [(row, value) for row, value in orders if value is not None]
        yield from scores_of(
            [row for row, _ in defined], cut.setting, "reward_correlation", [value for _, value in defined]
        )


def _nestedness(
    model: LanguageModel, continuation: Continuation, ranked: Ranked, budgets: Sequence[int]
) -> Iterator[Finding]:
    """Of the best sets, so of true importance; `ranked` is any contender, for its state."""
    cut, full = continuation.cut, ranked.state.importance
    assert full is not None
    ascending = sorted(budgets)
    best = [kept_positions(full, budget) for budget in ascending]
    recomputed = recompute_importance(
        model, continuation.whole, best, continuation.token_ids, num_context=cut.num_context
    )
    for smaller, larger in combinations(range(len(ascending)), 2):
        nested = compare_nested_sets(full, recomputed[larger], best[larger], ascending[smaller])
        quantities = {"overlap": nested.overlap, "excess_missed_mass": nested.excess_missed_mass}
        for quantity, by_head in quantities.items():
            yield Finding(
                setting=cut.setting,
                analysis="nestedness",
                quantity=quantity,
                method="oracle",
                seed=0,
                budget=ascending[smaller],
                larger_budget=ascending[larger],
                value=float(by_head.mean()),
            )


def _leave_one_out(
    model: LanguageModel, continuation: Continuation, ranked: Sequence[Ranked], count: int, *, seed: int
) -> Iterator[Finding]:
    cut, importance = continuation.cut, ranked[0].state.importance
    assert importance is not None
    tokens = choose_tokens(importance.sum(dim=0), count, seed=seed)
    divergence = divergence_without(
        model, continuation.whole, tokens, continuation.token_ids[:-1], num_context=cut.num_context
    )
    for entry in ranked:
        method = entry.contender.method
        worth = importance.sum(dim=0) if method.needs_importance else token_scores(entry.scores)
        value = float(spearman(worth[tokens], divergence))
        if not math.isnan(value):  # where scores or harms are all alike there is no order
            yield Finding(
                setting=cut.setting,
                analysis="leave_one_out",
                quantity="spearman",
                method=method.name,
                seed=entry.contender.seed,
                budget=None,
                larger_budget=None,
                value=value,
            )
