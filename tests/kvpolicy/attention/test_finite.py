"""NaN and infinities: found when a model is loaded or at the first sample, by layer, in every kind of pass."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.probe import run_probe
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.loading import load_language_model
from kvpolicy.inference.streaming import StreamedCaches, StreamedRow
from kvpolicy.methods.streaming_llm import StreamingLLM
from kvpolicy.models.finite import is_finite, require_finite_entries

DAMAGE = {
    "lm_head.weight": (torch.nan, "the model's logits are not finite"),
    "model.layers.1.self_attn.k_proj.weight": (torch.nan, "the model's hidden states after layer 1 are not finite"),
    "model.layers.2.mlp.up_proj.weight": (torch.nan, "the model's hidden states after layer 2 are not finite"),
    "model.layers.0.self_attn.v_proj.weight": (torch.inf, "the model's hidden states after layer 0 are not finite"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_weights_are_one_line_when_the_model_is_loaded(tiny_model_folder, tmp_path, fails_in_one_line, name):
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    value, expected = DAMAGE[name]
    weights[name][3, 5] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = fails_in_one_line(load_language_model, folder)
    assert expected in message and str(folder) in message
    assert "weights are damaged, or bfloat16 is too small" in message and "another dtype" in message


@pytest.fixture
def damaged(tiny_model_folder):
    """A model that passes when it is loaded, and has one token whose embedding is NaN."""
    model = load_language_model(tiny_model_folder("llama"), dtype="float32")
    model.embedding_table[65] = torch.nan
    return model


TEXT = torch.tensor([70, 71, 72, 65, 73, 74])


def test_a_prefill_names_the_layer(damaged, fails_in_one_line):
    assert prefill(damaged, TEXT[:3], num_queries=1).num_tokens == 3
    for num_logits in (0, 1):
        message = fails_in_one_line(prefill, damaged, TEXT, num_queries=1, num_logits=num_logits)
        assert "hidden states after layer 0 are not finite" in message and "float32 is too small" in message


def test_entries_that_overflow_are_named_where_the_logits_hide_it(fails_in_one_line):
    """A key of minus infinity may never be attended to, but no agent can read it."""
    keys, values = torch.zeros(2, 3, 1, 4, 8, dtype=torch.float16), torch.zeros(2, 3, 1, 4, 8, dtype=torch.float16)
    require_finite_entries(keys, values)
    values[1, 2, 0, 3, 0] = torch.inf
    message = fails_in_one_line(require_finite_entries, keys, values)
    assert "values of layer 2 are not finite" in message and "float16 is too small" in message
    keys[0, 1, 0, 0, 7] = -torch.inf
    assert "keys of layer 1 are not finite" in fails_in_one_line(require_finite_entries, keys, values)


def test_caches_streams_and_probes_name_the_layer(damaged, fails_in_one_line):
    spec, positions = damaged.spec, torch.arange(3, 6)[None]
    context = prefill(damaged, TEXT[:3], num_queries=1)
    cache = CompactedCache(
        context.keys,
        context.values,
        [torch.arange(3).expand(spec.num_heads, -1)],
        num_kv_heads=spec.num_kv_heads,
        num_new_tokens=3,
    )
    expected = "hidden states after layer 0 are not finite"
    assert expected in fails_in_one_line(cache.run, damaged, TEXT[None, 3:], positions, num_logits=1)
    assert cache.num_past_tokens == 3
    stream = StreamedCaches(damaged, [StreamedRow(method=StreamingLLM(), budget=20)], interval_tokens=2)
    assert expected in fails_in_one_line(stream.run, damaged, TEXT[None], torch.arange(6)[None], num_logits=1)
    broken = damaged.embedding_table[65:66]
    assert expected in fails_in_one_line(run_probe, damaged, context.keys, context.values, broken)


@pytest.mark.parametrize(
    "values", [[], [1.0, -2.0], [torch.nan, 0.0], [0.0, torch.inf], [-torch.inf, 0.0], [torch.inf, torch.nan]]
)
def test_finite_values_are_told_from_others(values):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert is_finite(torch.tensor(values, dtype=dtype)) == all(abs(value) < torch.inf for value in values)
