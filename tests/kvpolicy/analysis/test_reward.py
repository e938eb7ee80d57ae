"""Importance on a compacted cache against eager attention that hides what was evicted, and what is made of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.analysis.reward import (
    ObservedCache,
    missed_mass,
    received_importance,
    recompute_importance,
    reward_survival,
)
from kvpolicy.attention import weights
from kvpolicy.attention.importance import importance
from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.prefill import prefill
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.methods.ranking import NOT_KEPT, kept_positions
from tests.kvpolicy.analysis.masked import masked_importance

NUM_CONTEXT, NUM_TOKENS = 26, 38


@pytest.fixture
def whole(tiny_model, draw_tokens):
    """Makes the prefill of context and future of a model."""

    def make(family):
        return prefill(tiny_model(family), draw_tokens(NUM_TOKENS), num_queries=NUM_TOKENS)

    return make


def _ragged_kept(num_heads, seed):
    generator = torch.Generator().manual_seed(seed)
    budgets = torch.randint(2, NUM_CONTEXT + 1, (num_heads,), generator=generator)
    scores = torch.rand(num_heads, NUM_CONTEXT, generator=generator)
    return kept_positions(scores, budgets, num_sink_tokens=1, num_recent_tokens=1)


@pytest.mark.parametrize("family", ["llama", "llama_mha", "gemma", "qwen3"])
def test_it_is_what_eager_attention_pays_where_evicted_entries_are_hidden(
    tiny_model, eager_network, draw_tokens, whole, family
):
    model, tokens = tiny_model(family), draw_tokens(NUM_TOKENS)
    kept = [_ragged_kept(model.spec.num_heads, seed) for seed in (0, 1)]
    kept.append(torch.arange(5, 9).expand(model.spec.num_heads, -1))
    found = recompute_importance(model, whole(family), kept, tokens[NUM_CONTEXT:], num_context=NUM_CONTEXT)
    for own, indices in zip(found, kept, strict=True):
        everything = masked_importance(eager_network(family), tokens, indices, model.spec, NUM_CONTEXT)
        expected = everything.gather(1, indices.clamp_min(0)) * (indices != NOT_KEPT)
        torch.testing.assert_close(own, expected, atol=2e-4, rtol=1e-3)


def test_evicting_nothing_gives_the_full_caches_importance(tiny_model, draw_tokens, whole):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    everything = torch.arange(NUM_CONTEXT).expand(model.spec.num_heads, -1)
    full = importance(whole("llama"), num_context=NUM_CONTEXT, num_future=NUM_TOKENS - NUM_CONTEXT)
    (found,) = recompute_importance(model, whole("llama"), [everything], tokens[NUM_CONTEXT:], num_context=NUM_CONTEXT)
    torch.testing.assert_close(found, full, atol=2e-5, rtol=1e-4)
    survival = reward_survival(full, found, everything)
    assert survival.mean_missed_mass == 0.0
    assert survival.mean_correlation == pytest.approx(1.0, abs=0.01)


def test_observing_changes_no_logit_and_sees_the_first_pass_alone(tiny_model, draw_tokens, whole):
    model, tokens, full = tiny_model("llama"), draw_tokens(NUM_TOKENS), whole("llama")
    parts = (full.keys[:, :NUM_CONTEXT], full.values[:, :NUM_CONTEXT], [_ragged_kept(model.spec.num_heads, 0)])
    counts = {"num_kv_heads": model.spec.num_kv_heads, "num_new_tokens": 12}
    plain, observed = CompactedCache(*parts, **counts), ObservedCache(*parts, **counts)
    for first, last in ((26, 32), (32, 38)):
        ids, positions = tokens[None, first:last], torch.arange(first, last)[None]
        logits = [cache.run(model, ids, positions, num_logits=last - first) for cache in (plain, observed)]
        assert torch.equal(*logits)
        if first == 26:
            after_first = observed.importance[0].clone()
    assert torch.equal(observed.importance[0], after_first)
    alone = recompute_importance(model, full, parts[2], tokens[26:32], num_context=NUM_CONTEXT)
    torch.testing.assert_close(after_first, alone[0])


def test_blocks_do_not_show(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(3, 2, 9, 8, generator=generator), torch.randn(3, 20, 8, generator=generator)
    new_keys = torch.randn(3, 9, 8, generator=generator)
    kept = kept_positions(torch.rand(3, 20, generator=generator), 7, num_sink_tokens=0, num_recent_tokens=0)
    whole = received_importance(queries, keys, new_keys, kept, scaling=LogitScale(factor=0.3))
    monkeypatch.setattr(weights, "MAX_BLOCK_BYTES", 1)  # one query of one head at a time
    torch.testing.assert_close(
        received_importance(queries, keys, new_keys, kept, scaling=LogitScale(factor=0.3)), whole
    )


def test_survival_by_hand():
    full = torch.tensor([[5.0, 1.0, 2.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [4.0, 3.0, 2.0, 1.0, 0.0]])
    kept = torch.tensor([[0, 1, 2], [0, 1, 4], [NOT_KEPT, 0, 2]])
    recomputed = torch.tensor([[9.0, 2.0, 1.0], [1.0, 2.0, 3.0], [0.0, 1.0, 8.0]])
    survival = reward_survival(full, recomputed, kept)
    assert survival.missed_mass.tolist() == pytest.approx([0.2, 0.0, 0.4])
    assert survival.correlation[[0, 2]].tolist() == pytest.approx([0.5, -1.0])
    assert survival.correlation[1].isnan()  # nothing is attended: no order
    assert survival.mean_correlation == pytest.approx(-0.25)
    assert survival.mean_missed_mass == pytest.approx(0.2)
    assert reward_survival(full[1:2], recomputed[1:2], kept[1:2]).mean_correlation is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 19))
def test_missed_mass_falls_with_the_budget_and_is_least_for_the_oracle(seed, budget):
    generator = torch.Generator().manual_seed(seed)
    full = torch.rand(2, 20, generator=generator) ** 4
    scores = torch.rand(2, 20, generator=generator)
    always = {"num_sink_tokens": 0, "num_recent_tokens": 0}
    smaller, larger, best = (
        missed_mass(full, kept_positions(*chosen, **always))
        for chosen in ((scores, budget), (scores, budget + 1), (full, budget))
    )
    assert ((larger <= smaller + 1e-6) & (best <= smaller + 1e-6) & (best >= 0) & (smaller <= 1)).all()
