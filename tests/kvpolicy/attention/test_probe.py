"""Probing a cache is what the model does with embeddings at the end of the sequence, with gradients."""

import pytest
import torch

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.probe import probe_attention, run_probe
from kvpolicy.attention.weights import attention_blocks
from kvpolicy.inference.cache import CompactedCache

FAMILIES = ("llama", "llama_mha", "qwen2", "qwen3", "phi3", "mistral", "gemma")


def _embed(model, tokens):
    return model.network.get_input_embeddings()(tokens)  # Gemma scales what its table holds


@pytest.mark.parametrize("family", FAMILIES)
def test_probing_with_the_embeddings_of_tokens_is_running_those_tokens(tiny_model, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(30)
    whole = prefill(model, tokens, num_queries=6)
    probe = run_probe(model, whole.keys[:, :24], whole.values[:, :24], _embed(model, tokens[24:]))
    torch.testing.assert_close(probe.queries, whole.queries, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(probe.keys, whole.keys[:, 24:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llama_mha"])
def test_attention_of_a_probe_is_eager_attentions(tiny_model, eager_network, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(30)
    context = prefill(model, tokens[:24], num_queries=0)
    probe = run_probe(model, context.keys, context.values, _embed(model, tokens[24:]))
    found = probe_attention(probe, context.keys, scaling=context.scaling)
    with torch.no_grad():
        layers = eager_network(family)(input_ids=tokens[None], output_attentions=True, use_cache=False).attentions
    weights = torch.cat([layer[0, :, 24:, :24] for layer in layers]).unflatten(0, (model.spec.num_heads, -1))
    torch.testing.assert_close(found, weights.mean(dim=(1, 2)), atol=1e-5, rtol=1e-4)


def test_positions_follow_a_compacted_context_as_the_caller_says(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(30)
    context = prefill(model, tokens[:24], num_queries=0)
    kept = torch.arange(24)[::2].expand(model.spec.num_heads, -1)
    cache = CompactedCache(
        context.keys, context.values, [kept], num_kv_heads=model.spec.num_kv_heads, num_new_tokens=6, num_queries=6
    )
    cache.run(model, tokens[None, 24:], torch.arange(24, 30)[None], num_logits=1)
    state = cache.state(0)
    probe = run_probe(
        model, context.keys[:, ::2], context.values[:, ::2], _embed(model, tokens[24:]), first_position=24
    )
    torch.testing.assert_close(probe.queries, state.queries, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(probe.keys, state.keys[:, 12:], atol=1e-4, rtol=1e-4)


def test_gradients_reach_the_embeddings_and_nothing_else(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(20)
    with torch.no_grad():
        context = prefill(model, tokens, num_queries=0)
    keys, values = context.keys.clone(), context.values.clone()
    embeddings = _embed(model, tokens[:3]).clone().requires_grad_()
    target = torch.rand(model.spec.num_heads, 20, generator=torch.Generator().manual_seed(0)) / 20

    def loss(where):
        found = probe_attention(run_probe(model, keys, values, where), keys, scaling=context.scaling)
        return (found - target).square().sum(dim=1).mean()

    loss(embeddings).backward()
    assert embeddings.grad.isfinite().all()
    assert all(parameter.grad is None for parameter in model.network.parameters())
    direction = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        step = 2e-3
        rise = (loss(embeddings + step * direction) - loss(embeddings - step * direction)) / (2 * step)
    assert float(rise) == pytest.approx(float((embeddings.grad * direction).sum()), rel=0.02)


def test_a_probe_that_does_not_fit_is_refused(tiny_model, draw_tokens, fails_in_one_line):
    model = tiny_model("llama", max_position_embeddings=32)
    context = prefill(model, draw_tokens(30), num_queries=0)
    message = fails_in_one_line(run_probe, model, context.keys, context.values, torch.zeros(3, 64))
    assert "position 32" in message
    message = fails_in_one_line(run_probe, model, context.keys, context.values, torch.zeros(2, 63))
    assert "embeddings have width 63, the model's have 64" in message


@pytest.mark.parametrize("max_block_bytes", [1, 3_000, 2**20])
def test_blocks_cover_every_head_and_query_once_and_sum_to_one(max_block_bytes):
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(5, 3, 9, 4, generator=generator), torch.randn(5, 20, 4, generator=generator)
    seen = torch.zeros(5, 20)
    total = 0
    for heads, weights in attention_blocks(
        queries, keys, scaling=LogitScale(factor=0.7), max_block_bytes=max_block_bytes
    ):
        assert max_block_bytes < 3_000 or weights.numel() * 4 <= max_block_bytes
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        seen[heads, : weights.shape[-1]] += weights.sum(dim=(1, 2))
        total += weights.shape[0] * weights.shape[2]
    assert total == 5 * 9
    expected = torch.zeros(5, 20)
    for query in range(9):
        own = 12 + query
        logits = torch.einsum("hgd,htd->hgt", queries[:, :, query], keys[:, :own]) * 0.7
        expected[:, :own] += logits.softmax(-1).sum(dim=1)
    torch.testing.assert_close(seen, expected)
