"""The rotary embedding as a value, against what transformers' own modules and functions do."""

import copy

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary

from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.rotary_proof import read_rotary
from kvpolicy.attention.session import ATTENTION_NAME, register_attention
from kvpolicy.models.language_model import LanguageModel, read_spec
from kvpolicy.models.rotary import turn, turn_back

FAMILIES = ("llama", "llama_mha", "qwen2", "qwen3", "phi3", "mistral", "gemma")
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
KINDS = {
    "plain": ("Llama", {"rope_type": "default"}),
    "linear": ("Llama", {"rope_type": "linear", "factor": 4.0}),
    "yarn": ("Llama", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "dynamic": ("Llama", {"rope_type": "dynamic", "factor": 4.0}),
    "partial": ("Phi3", {"rope_type": "default", "partial_rotary_factor": 0.75}),
    "partial longrope": (
        "Phi3",
        {
            "rope_type": "longrope",
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * 6,
            "long_factor": [4.0] * 6,
        },
    ),
}


def _model(family, rope):
    register_attention()
    # As in files of Phi: releases differ in where they look for these.
    also_outside = ("original_max_position_embeddings", "partial_rotary_factor") if family == "Phi3" else ()
    outside = {name: rope[name] for name in also_outside if name in rope}
    shape = {**SHAPE, **outside, "rope_parameters": {"rope_theta": 10_000.0, **rope}}
    config = getattr(transformers, f"{family}Config")(**shape)
    config._attn_implementation = ATTENTION_NAME
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    return LanguageModel(network=network, tokenizer=None, spec=read_spec(config))


def _gemma3(rope, kinds):
    register_attention()
    config = transformers.Gemma3TextConfig(
        **{**SHAPE, "rope_parameters": rope, "layer_types": kinds, "head_dim": 16, "sliding_window": 64}
    )
    config._attn_implementation = ATTENTION_NAME
    network = transformers.Gemma3ForCausalLM(config).eval().requires_grad_(False)
    return LanguageModel(network=network, tokenizer=None, spec=read_spec(config))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [20, 100])  # within the trained length and beyond it
def test_turning_is_what_transformers_applies(kind, num_tokens):
    family, rope = KINDS[kind]
    model = _model(family, rope)
    rotary = read_rotary(model, num_tokens)
    states = torch.randn(2, 2, num_tokens, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(num_tokens)[None]
    of_model = copy.deepcopy(model.network.get_decoder().rotary_emb)(states, positions)
    expected = (apply_partial_rotary if family == "Phi3" else apply_rotary_pos_emb)(states, states, *of_model)[0]
    cos, sin = (part[:, None] for part in rotary.cos_sin(positions, num_heads=2))
    found = turn(states, cos, sin)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turn_back(found, cos, sin), states, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "partial longrope"])
def test_reading_changes_nothing_in_the_model(kind):
    model = _model(*KINDS[kind])
    tokens = torch.arange(20)
    before = prefill(model, tokens, num_queries=20).queries
    state = copy.deepcopy(vars(model.network.get_decoder().rotary_emb))
    read_rotary(model, 100)
    after = vars(model.network.get_decoder().rotary_emb)
    assert {k: v for k, v in after.items() if isinstance(v, int | float)} == {
        k: v for k, v in state.items() if isinstance(v, int | float)
    }
    assert torch.equal(prefill(model, tokens, num_queries=20).queries, before)


def test_frequencies_that_depend_on_the_length_are_those_of_the_length():
    for kind in ("dynamic", "partial longrope"):
        model = _model(*KINDS[kind])
        assert not torch.equal(read_rotary(model, 20).frequencies, read_rotary(model, 100).frequencies)


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_turned_back_are_the_projections(tiny_model, draw_tokens, family):
    """Of the first layer, whose input is known: the embeddings."""
    model, tokens = tiny_model(family), draw_tokens(30)
    inputs = {}
    layer = model.network.model.layers[0].self_attn
    projection = layer.qkv_proj if family == "phi3" else layer.q_proj
    hook = projection.register_forward_hook(lambda module, given, output: inputs.update(query=output))
    whole = prefill(model, tokens, num_queries=30)
    hook.remove()
    dim, spec = model.spec.head_dim, model.spec
    expected = inputs["query"][0, :, : spec.num_query_heads * dim].view(30, spec.num_kv_heads, -1, dim)
    if family == "qwen3":
        expected = layer.q_norm(expected)
    cos, sin = read_rotary(model, 30).cos_sin(torch.arange(30)[None], num_heads=spec.num_heads)
    found = turn_back(whole.queries.float(), cos[:, None], sin[:, None])
    torch.testing.assert_close(found[: spec.num_kv_heads], expected.permute(1, 2, 0, 3), atol=1e-4, rtol=1e-4)


def test_layers_of_different_frequencies_have_a_row_each():
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    }
    kinds = ["sliding_attention", "full_attention"]
    model = _gemma3(rope, kinds)
    rotary = read_rotary(model, 40)
    positions = torch.arange(40)[None]
    cos, sin = rotary.cos_sin(positions, num_heads=model.spec.num_heads)
    for layer, kind in enumerate(kinds):
        expected = model.network.get_decoder().rotary_emb(torch.zeros(1), positions, kind)
        torch.testing.assert_close(torch.cat((cos[layer], cos[layer]), dim=-1), expected[0][0])
        torch.testing.assert_close(torch.cat((sin[layer], sin[layer]), dim=-1), expected[1][0])


def test_positions_by_head_turn_each_head_by_its_own():
    rotary = read_rotary(_model(*KINDS["plain"]), 50)
    states = torch.randn(3, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4], [3, 9, 20, 30, 40], [1, 2, 10, 11, 49]])
    cos, sin = rotary.cos_sin(positions, num_heads=3)
    for head in range(3):
        one = rotary.cos_sin(positions[head : head + 1], num_heads=3)
        torch.testing.assert_close(turn(states, cos[:, None], sin[:, None])[head], turn(states[head], one[0], one[1]))


def test_another_layout_and_layers_without_positions_are_refused(monkeypatch, fails_in_one_line):
    import transformers.models.llama.modeling_llama as llama

    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        def swap(x):
            return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)

        half = cos.shape[-1] // 2

        def back(x):
            return torch.stack((x[..., :half], x[..., half:]), dim=-1).flatten(-2)

        turned = apply_rotary_pos_emb(swap(q), swap(k), cos, sin)
        return back(turned[0]), back(turned[1])

    model = _model(*KINDS["plain"])
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", interleaved)
    assert "layers 0, 1 of 2 do not turn" in fails_in_one_line(read_rotary, model, 20)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert "another layout of channels, or no positions" in fails_in_one_line(read_rotary, model, 20)


def test_a_model_without_a_rotary_embedding_is_refused(fails_in_one_line):
    model = _model(*KINDS["plain"])
    del model.network.model.rotary_emb
    assert "'llama' has no rotary embedding" in fails_in_one_line(read_rotary, model, 20)
