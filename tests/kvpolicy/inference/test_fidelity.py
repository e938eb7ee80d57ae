"""What is computed against the model's own attention: families that agree, and subtle faults that are found."""

from dataclasses import replace

import pytest
import torch
import transformers.models.llama.modeling_llama as llama

from kvpolicy.attention.session import ATTENTION_NAME
from kvpolicy.inference import cache
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.fidelity import (
    BY_TOKEN,
    CALL_TOLERANCE,
    FIRST_KEYS,
    IN_CHUNKS,
    WHOLE,
    measure_fidelity,
    require_own_attention,
)
from kvpolicy.inference.loading import load_language_model
from tests.conftest import FAMILIES, OTHER_FAMILIES

SUPPORTED = tuple(name for name in FAMILIES | OTHER_FAMILIES if name != "diffllama")
TYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", SUPPORTED)
def test_sessions_compute_the_attention_of_every_family(tiny_model, family, dtype):
    model = tiny_model(family, dtype=dtype)  # loading has asked already
    fidelity = measure_fidelity(model)
    assert {path for path, _ in fidelity.passes} == {WHOLE, IN_CHUNKS, BY_TOKEN}
    assert len(fidelity.calls) == model.spec.num_layers and max(fidelity.calls.values()) < CALL_TOLERANCE / 50
    rounding = {"float32": 1e-5, "float16": 0.005, "bfloat16": 0.05}[dtype]
    routed = {} if family != "granite_moe" else {(WHOLE, name) for name in ("keys", "values", "logits")}
    assert max(difference for path, difference in fidelity.passes.items() if path not in routed) < rounding


def test_a_layer_of_zeros_is_no_difference(tiny_model_folder):
    model = load_language_model(tiny_model_folder("llama"))
    model.network.model.layers[0].self_attn.v_proj.weight.zero_()
    require_own_attention(model)


def test_asking_leaves_nothing_behind(tiny_model, draw_tokens):
    model, tokens = tiny_model("gemma3"), draw_tokens(1, 20)
    before = model.logits(tokens, torch.arange(20)[None], 20)
    require_own_attention(model)
    assert torch.equal(model.logits(tokens, torch.arange(20)[None], 20), before)
    assert model.network.config._attn_implementation == ATTENTION_NAME
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.network.modules())


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_a_model_of_few_positions_is_asked_too(tiny_model, most):
    assert max(measure_fidelity(tiny_model("llama", max_position_embeddings=most)).passes.values()) < 1e-5


def test_differential_attention_is_refused_when_it_is_loaded(tiny_model_folder, fails_in_one_line):
    message = fails_in_one_line(load_language_model, tiny_model_folder("diffllama"))
    twice, other = "layers 0, 1, 2 of 3 ran attention more than once", "cannot be loaded"  # by release
    assert (twice in message or other in message) and "diffllama" in message


@pytest.fixture(params=TYPES)
def model(request, tiny_model):
    return tiny_model("llama", dtype=request.param)


EAGER = llama.eager_attention_forward


@pytest.mark.parametrize("factor", [0.99, 1.01, 1.05])
def test_a_scale_of_the_models_own_is_found(model, monkeypatch, fails_in_one_line, factor):
    def scaled(module, query, key, value, mask, scaling, **options):
        return EAGER(module, query, key, value, mask, scaling=scaling * factor, **options)

    monkeypatch.setattr(llama, "eager_attention_forward", scaled)
    message = fails_in_one_line(require_own_attention, model)
    assert "attention of layer 0" in message and "standard deviations from the model's own" in message


def test_a_cap_that_is_not_given_to_the_attention_function_is_found(tiny_model, monkeypatch, fails_in_one_line):
    model = tiny_model("gemma2")
    monkeypatch.setattr(model.network.model.layers[1].self_attn, "attn_logit_softcapping", None)
    message = fails_in_one_line(require_own_attention, model)
    assert "layer 1 caps its logits at None, config.json says 2.0" in message


def test_a_mask_of_the_models_own_is_found(model, monkeypatch, fails_in_one_line):
    mask = llama.create_causal_mask

    def narrow(*args, **kwargs):  # the first token is seen by none but itself
        made = mask(*args, **kwargs)
        if made is not None:
            made = made.clone()
            made[:, :, 1:, 0] = False
        return made

    monkeypatch.setattr(llama, "create_causal_mask", narrow)
    assert "attention of layer 0" in fails_in_one_line(require_own_attention, model)


def test_a_mask_of_a_cache_that_is_off_by_one_is_found(model, monkeypatch, fails_in_one_line):
    additive = CompactedCache._additive_mask

    def shifted(self, is_held, num_new_tokens, group_size):
        made = additive(self, is_held, num_new_tokens, group_size)
        made[..., -num_new_tokens - 1] = -torch.inf
        return made

    monkeypatch.setattr(CompactedCache, "_additive_mask", shifted)
    assert "on a cache that holds everything" in fails_in_one_line(require_own_attention, model)


def test_a_scale_of_a_cache_that_is_off_is_found(model, monkeypatch, fails_in_one_line):
    attend = cache.attend_masked

    def scaled(query, key, value, scaling, mask):
        return attend(query, key, value, replace(scaling, factor=scaling.factor * 1.05), mask=mask)

    monkeypatch.setattr(cache, "attend_masked", scaled)
    assert "attention of layer 0" in fails_in_one_line(require_own_attention, model)


def test_positions_that_begin_anew_in_every_pass_are_found(model, monkeypatch, fails_in_one_line):
    rotary = model.decoder.rotary_emb
    forward = rotary.forward

    def anew(states, position_ids):
        return forward(states, position_ids - position_ids.min())

    monkeypatch.setattr(rotary, "forward", anew)
    message = fails_in_one_line(require_own_attention, model)
    assert f"{FIRST_KEYS} {WHOLE} differ by" in message and "counts positions by itself" in message


def test_positions_of_a_cache_that_are_off_by_one_are_found(model, monkeypatch, fails_in_one_line):
    run = CompactedCache.run

    def shifted(self, model, token_ids, positions, num_logits):
        return run(self, model, token_ids, positions + 1, num_logits)

    monkeypatch.setattr(CompactedCache, "run", shifted)
    assert f"keys {IN_CHUNKS} differ by" in fails_in_one_line(require_own_attention, model)


def test_positions_of_a_whole_text_that_are_off_by_one_are_found(model, monkeypatch, fails_in_one_line):
    logits = type(model).logits

    def shifted(self, token_ids, positions, num_logits):
        return logits(self, token_ids, positions + (token_ids.shape[1] > 20), num_logits)

    monkeypatch.setattr(type(model), "logits", shifted)
    assert f"{FIRST_KEYS} {WHOLE} differ by" in fails_in_one_line(require_own_attention, model)


def test_a_layer_that_remembers_more_than_keys_and_values_is_found(tiny_model, monkeypatch, fails_in_one_line):
    """As convolutions over tokens do: here each token's input is mixed with that of the one before, in one pass."""
    model = tiny_model("llama")
    layer = model.network.model.layers[1]
    forward = layer.forward

    def mixed(states, *args, **kwargs):
        before = torch.cat((states[:, :1], states[:, :-1]), dim=1)
        return forward(0.9 * states + 0.1 * before, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", mixed)
    assert "it keeps more than keys and values" in fails_in_one_line(require_own_attention, model)
