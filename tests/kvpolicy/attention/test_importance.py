"""Importance in blocks equals its definition on the attention that transformers itself reports, in linear memory."""

import pytest
import torch

import kvpolicy.attention.weights as module
from kvpolicy.attention import session
from kvpolicy.attention.importance import importance
from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.prefill import Prefill, prefill

FAMILIES = ("llama", "llama_mha", "qwen2", "qwen3", "phi3", "mistral", "gemma", "gemma2")
NUM_TOKENS = 48
SPLITS = [(47, 1), (40, 8), (24, 24), (1, 47), (10, 5)]  # the last leaves tokens after the future, which do not count


def _defined_importance(network, token_ids, num_kv_heads, num_context, num_future):
    """The definition of `kvpolicy.attention.importance`, over the full attention matrices of eager attention."""
    with torch.no_grad():
        layers = network(input_ids=token_ids[None], output_attentions=True, use_cache=False).attentions
    rows = []
    for attention in layers:
        group = attention.shape[1] // num_kv_heads
        for head in range(num_kv_heads):
            members = attention[0, head * group : (head + 1) * group, num_context : num_context + num_future]
            rows.append(members[..., :num_context].amax(dim=0).sum(dim=0))
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocked_importance_is_eager_attentions(tiny_model, eager_network, draw_tokens, monkeypatch, family):
    model, network, tokens = tiny_model(family), eager_network(family), draw_tokens(NUM_TOKENS)
    wholes = {future: prefill(model, tokens, num_queries=NUM_TOKENS - context) for context, future in SPLITS}
    for num_context, num_future in SPLITS:
        expected = _defined_importance(network, tokens, model.spec.num_kv_heads, num_context, num_future)
        for block_bytes in (1, 20_000, 2**26):  # a query at a time, some, all
            monkeypatch.setattr(module, "MAX_BLOCK_BYTES", block_bytes)
            found = importance(wholes[num_future], num_context=num_context, num_future=num_future)
            assert found.shape == (model.spec.num_heads, num_context)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_compared_attention_is_far_from_uniform(eager_network, draw_tokens):
    # Otherwise any importance would pass above.
    with torch.no_grad():
        layers = eager_network("llama")(
            input_ids=draw_tokens(NUM_TOKENS)[None], output_attentions=True, use_cache=False
        ).attentions
    last = torch.stack(layers)[:, 0, :, -1]
    assert last.amax(dim=-1).median() > 5 / NUM_TOKENS


@pytest.mark.parametrize("family", ["llama", "llama_mha"])
def test_importance_is_at_most_the_future_times_the_group(tiny_model, draw_tokens, family):
    model = tiny_model(family)
    found = importance(prefill(model, draw_tokens(40), num_queries=12), num_context=28, num_future=12)
    assert (found >= 0).all()
    assert (found.sum(dim=1) <= 12 * model.spec.group_size + 1e-4).all()


def test_bfloat16_importance_stays_near_float32s(tiny_model, draw_tokens):
    found = [
        importance(
            prefill(tiny_model("llama", dtype=dtype), draw_tokens(40), num_queries=12), num_context=28, num_future=12
        )
        for dtype in ("float32", "bfloat16")
    ]
    assert found[1].dtype == torch.float32
    assert (found[0] - found[1]).abs().mean() < 0.05 * found[0].mean()


def test_memory_grows_with_tokens_and_not_with_their_square(live_bytes, monkeypatch):
    monkeypatch.setattr(module, "MAX_BLOCK_BYTES", 2**19)
    peaks = {}
    for num_tokens in (512, 2_048):
        generator = torch.Generator().manual_seed(0)
        half = num_tokens // 2  # context and future grow together: their product is quadratic
        whole = Prefill(
            keys=torch.randn(2, num_tokens, 8, generator=generator),
            values=torch.randn(2, num_tokens, 8, generator=generator),
            queries=torch.randn(2, 2, half, 8, generator=generator),
            logits=torch.zeros(1, 4),
            scaling=LogitScale(factor=8**-0.5),
            num_kv_heads=2,
        )
        with live_bytes() as counter:
            importance(whole, num_context=half, num_future=half)
        peaks[num_tokens] = counter.peak
    assert peaks[2_048] < 2 * 2 * (2_048 // 2) * 2_048 * 4 / 8  # an eighth of all weights at once
    assert peaks[2_048] < 4.4 * peaks[512]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "gemma2"])
def test_a_prefill_makes_no_square_tensor(tiny_model, draw_tokens, live_bytes, monkeypatch, family):
    # A mask of all pairs would be one: 16 GB at 128K tokens.
    options = {"sliding_window": 4_096} if family == "gemma2" else {}
    model = tiny_model(family, max_position_embeddings=4_096, **options)
    monkeypatch.setattr(session, "_CAPPED_BYTES", 2**18)
    peaks = []
    for num_tokens in (256, 1_024):
        with live_bytes() as counter:
            prefill(model, draw_tokens(num_tokens), num_queries=16)
        peaks.append(counter.peak)
    assert peaks[1] < 4.2 * peaks[0]
