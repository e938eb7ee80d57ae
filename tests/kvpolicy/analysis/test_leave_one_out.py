"""One token out: against eager attention that hides it, and correlations that are known."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.analysis.leave_one_out import all_but_one, choose_tokens, divergence_without, token_scores
from kvpolicy.analysis.ranks import spearman
from kvpolicy.attention.importance import importance
from kvpolicy.attention.prefill import prefill
from kvpolicy.inference import batching
from kvpolicy.inference.likelihood import kl_divergence
from tests.kvpolicy.analysis.masked import masked_forward

NUM_CONTEXT, NUM_TOKENS = 26, 38


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_divergence_is_that_of_hiding_the_token_everywhere(tiny_model, eager_network, draw_tokens, family):
    model, tokens, network = tiny_model(family), draw_tokens(NUM_TOKENS), eager_network(family)
    whole, left_out = prefill(model, tokens, num_queries=0), torch.tensor([0, 7, 25])
    found = divergence_without(model, whole, left_out, tokens[NUM_CONTEXT:-1], num_context=NUM_CONTEXT)
    with torch.no_grad():
        full = network(input_ids=tokens[None], use_cache=False).logits[0, NUM_CONTEXT:-1]
    for token, own in zip(left_out, found, strict=True):
        kept = torch.tensor([index for index in range(NUM_CONTEXT) if index != token])
        hidden = masked_forward(network, tokens, kept.expand(model.spec.num_heads, -1), model.spec, NUM_CONTEXT)
        expected = kl_divergence(full, hidden.logits[:, NUM_CONTEXT:-1]).mean()
        assert own.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)
    assert found.min() > 1e-5


def test_batches_do_not_show(tiny_model, draw_tokens, monkeypatch):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    whole, left_out = prefill(model, tokens, num_queries=0), torch.arange(9)
    arguments = (model, whole, left_out, tokens[NUM_CONTEXT:])
    together = divergence_without(*arguments, num_context=NUM_CONTEXT)
    monkeypatch.setattr(batching, "MAX_ENTRIES", 2 * NUM_CONTEXT)
    torch.testing.assert_close(divergence_without(*arguments, num_context=NUM_CONTEXT), together, rtol=1e-3, atol=1e-6)


def test_summed_importance_tracks_the_harm(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    whole, everything = prefill(model, tokens, num_queries=12), torch.arange(NUM_CONTEXT)
    received = importance(whole, num_context=NUM_CONTEXT, num_future=12).sum(dim=0)
    harm = divergence_without(model, whole, everything, tokens[NUM_CONTEXT:], num_context=NUM_CONTEXT)
    assert spearman(received, harm) > 0.3


def test_a_row_keeps_all_other_tokens_in_all_heads():
    rows = all_but_one(torch.tensor([2, 0]), num_heads=3, num_tokens=4)
    assert [row.tolist() for row in rows] == [[[0, 1, 3]] * 3, [[1, 2, 3]] * 3]


def test_a_tokens_score_is_its_mean_rank_over_heads():
    scores = torch.tensor([[1.0, 2.0, 3.0], [900.0, 100.0, -7.0], [5.0, 5.0, 9.0]])
    assert token_scores(scores).tolist() == pytest.approx([(0 + 1 + 0.25) / 3, (0.5 + 0.5 + 0.25) / 3, (1 + 0 + 1) / 3])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 60))
def test_tokens_are_drawn_from_the_whole_range(seed, count):
    scores = torch.rand(50, generator=torch.Generator().manual_seed(seed))
    chosen = choose_tokens(scores, count, seed=seed, num_sink_tokens=3, num_recent_tokens=7)
    assert len(chosen) == min(count, 40) == len(set(chosen.tolist()))
    assert chosen.min() >= 3 and chosen.max() < 43
    ranks = scores[3:43].argsort().argsort()[chosen - 3]
    width = 40 / len(chosen)
    for stratum, rank in enumerate(ranks.tolist()):
        assert round(stratum * width) <= rank < round((stratum + 1) * width)


def test_a_seed_repeats_the_draw():
    scores = torch.rand(100, generator=torch.Generator().manual_seed(0))
    draws = [choose_tokens(scores, 8, seed=seed).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_bad_input_is_one_line(fails_in_one_line, tiny_model, draw_tokens):
    assert "0 of 30" in fails_in_one_line(choose_tokens, torch.rand(50), 0, seed=0)
    assert "4 of 0" in fails_in_one_line(choose_tokens, torch.rand(20), 4, seed=0)
    model, tokens = tiny_model("llama"), draw_tokens(NUM_TOKENS)
    whole = prefill(model, tokens, num_queries=0)
    arguments = (divergence_without, model, whole, torch.tensor([3, 26]), tokens[NUM_CONTEXT:])
    assert "26" in fails_in_one_line(*arguments, num_context=NUM_CONTEXT)
