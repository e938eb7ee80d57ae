"""Nested by construction where importance is fixed; measured where it is computed again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.analysis.nestedness import compare_nested_sets
from kvpolicy.analysis.reward import recompute_importance
from kvpolicy.attention.importance import importance
from kvpolicy.attention.prefill import prefill
from kvpolicy.methods.ranking import kept_positions

ALWAYS = {"num_sink_tokens": 2, "num_recent_tokens": 3}
FREE = {"num_sink_tokens": 0, "num_recent_tokens": 0}
BUDGETS = st.tuples(st.integers(5, 20), st.integers(5, 20)).map(sorted)


def _importance(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) ** 3


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), BUDGETS)
def test_with_fixed_importance_the_sets_are_nested(seed, budgets):
    full, (smaller, larger) = _importance(seed, 3, 20), budgets
    kept = kept_positions(full, larger, **ALWAYS)
    for small, large in zip(kept_positions(full, smaller, **ALWAYS).tolist(), kept.tolist(), strict=True):
        assert set(small) <= set(large)
    found = compare_nested_sets(full, full.gather(1, kept), kept, smaller, **ALWAYS)
    assert (found.overlap == 1).all()
    assert (found.excess_missed_mass == 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), BUDGETS)
def test_overlap_and_excess_are_those_of_sets(seed, budgets):
    full, (smaller, larger) = _importance(seed, 3, 20), budgets
    kept = kept_positions(full, larger, **ALWAYS)
    recomputed = _importance(seed + 1, 3, larger)
    found = compare_nested_sets(full, recomputed, kept, smaller, **ALWAYS)
    always = {0, 1, 17, 18, 19}
    for head in range(3):
        by_full = sorted(set(range(20)) - always, key=lambda i: -full[head, i])
        by_recomputed = sorted(
            set(range(2, larger - 3)), key=lambda i: -recomputed[head, i]
        )  # the first and last entries that were kept are the first and last tokens
        best = set(by_full[: smaller - 5])
        other = {int(kept[head, i]) for i in by_recomputed[: smaller - 5]}
        expected = len(best & other) / len(best) if best else 1.0
        assert found.overlap[head].item() == pytest.approx(expected)
        lost = (full[head, list(best)].sum() - full[head, list(other)].sum()) / full[head].sum()
        assert found.excess_missed_mass[head].item() == pytest.approx(lost.item(), abs=1e-6)
        assert found.excess_missed_mass[head] >= 0


def test_the_opposite_order_overlaps_by_what_the_larger_set_leaves():
    full = torch.arange(10.0)[None]
    larger = kept_positions(full, 6, **FREE)  # 4 to 9
    found = compare_nested_sets(full, -full.gather(1, larger), larger, 4, **FREE)  # 4 to 7 in place of 6 to 9
    assert found.overlap.tolist() == [0.5]
    assert found.excess_missed_mass.tolist() == pytest.approx([(30 - 22) / 45])


def test_it_is_measured_on_a_model(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(38)
    whole = prefill(model, tokens, num_queries=12)
    full = importance(whole, num_context=26, num_future=12)
    larger = kept_positions(full, 14, **ALWAYS)
    (recomputed,) = recompute_importance(model, whole, [larger], tokens[26:], num_context=26)
    found = compare_nested_sets(full, recomputed, larger, 9, **ALWAYS)
    assert found.overlap.shape == found.excess_missed_mass.shape == (model.spec.num_heads,)
    assert 0.5 < found.overlap.mean() < 1  # eviction changes what is attended, though not beyond recognition


def test_a_budget_above_the_larger_one_is_refused(fails_in_one_line):
    full = _importance(0, 2, 20)
    larger = kept_positions(full, 8, **ALWAYS)
    assert "9 tokens" in fails_in_one_line(compare_nested_sets, full, full.gather(1, larger), larger, 9, **ALWAYS)
