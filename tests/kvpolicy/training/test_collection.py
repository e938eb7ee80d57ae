"""What a sample leaves for training: the context's cache and its importance, against transformers' own attention."""

import pytest
import torch

from kvpolicy.inference.loading import load_language_model
from kvpolicy.names import SETTINGS
from kvpolicy.text.encoded_sample import encode
from kvpolicy.text.protocol import cut_sample
from kvpolicy.text.sample import Sample
from kvpolicy.training.collection import CollectConfig, collect_trace

FAMILY = "llama"


def _example(model, **changes):
    fields = {
        "sample_id": "ruler/niah_single_1/train/0/0/200",
        "benchmark": "ruler",
        "task": "niah_single_1",
        "split": "train",
        "context": "A special magic number is hidden in this text: 4821. Keep it well.",
        "question": " What is it?",
        "answer_prefix": " The number is",
        "answer": " 4821.",
        "references": ("4821",),
        "max_new_tokens": 24,
    }
    return encode(Sample(**(fields | changes)), model.tokenizer)


def _slow_trace(network, spec, token_ids, num_context):
    """Keys, values and importance of the context as transformers' eager attention has them, token by token."""
    with torch.no_grad():
        output = network(torch.tensor([token_ids]), output_attentions=True, use_cache=True)
    keys = torch.cat([layer.keys[0] for layer in output.past_key_values.layers])
    values = torch.cat([layer.values[0] for layer in output.past_key_values.layers])
    importance = torch.zeros(spec.num_heads, num_context)
    for layer, weights in enumerate(output.attentions):
        for kv_head in range(spec.num_kv_heads):
            group = slice(kv_head * spec.group_size, (kv_head + 1) * spec.group_size)
            for query in range(num_context, len(token_ids)):
                seen = weights[0, group, query, :num_context]
                importance[layer * spec.num_kv_heads + kv_head] += seen.max(dim=0).values
    return keys[:, :num_context], values[:, :num_context], importance


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_trace_is_what_eager_attention_shows(tiny_model, eager_network, setting):
    model, network = tiny_model(FAMILY), eager_network(FAMILY)
    example = _example(model)
    trace = collect_trace(model, example, setting)
    num_context = len(example.context_ids) + (len(example.question_ids) if setting == "query_aware" else 0)
    token_ids = [*example.context_ids, *example.question_ids, *example.answer_ids]
    keys, values, importance = _slow_trace(network, model.spec, token_ids, num_context)
    torch.testing.assert_close(trace.keys, keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trace.values, values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trace.importance, importance, rtol=1e-4, atol=1e-5)


def test_both_settings_see_one_cache(tiny_model):
    model = tiny_model(FAMILY)
    example = _example(model)
    agnostic, aware = (collect_trace(model, example, setting) for setting in ("query_agnostic", "query_aware"))
    num_context = len(example.context_ids)
    assert torch.equal(aware.keys[:, :num_context], agnostic.keys)
    assert torch.equal(aware.values[:, :num_context], agnostic.values)
    # The question is part of the future of the one and of the context of the other.
    assert bool((agnostic.importance >= aware.importance[:, :num_context]).all())
    assert agnostic.importance.sum() > aware.importance[:, :num_context].sum()


@pytest.mark.parametrize("setting", SETTINGS)
def test_importance_depends_on_the_future(tiny_model, setting):
    model = tiny_model(FAMILY)
    one, other = (collect_trace(model, _example(model, answer=answer), setting) for answer in (" 4821.", " 7777!"))
    assert torch.equal(one.keys, other.keys)
    assert not torch.allclose(one.importance, other.importance)


def test_traces_have_the_dtype_of_the_model(tiny_model):
    model = tiny_model(FAMILY, dtype="bfloat16")
    example = _example(model)
    trace = collect_trace(model, example, "query_agnostic")
    assert (trace.keys.dtype, trace.values.dtype, trace.importance.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert trace.importance.shape == (model.spec.num_heads, cut_sample(example, "query_agnostic").num_context)


def test_a_sample_beyond_the_model_is_refused(tiny_model, fails_in_one_line):
    model = tiny_model(FAMILY)
    message = fails_in_one_line(collect_trace, model, _example(model, context="x" * 600), "query_agnostic")
    assert "512" in message


def test_an_unknown_setting_is_refused(tiny_model, fails_in_one_line):
    model = tiny_model(FAMILY)
    assert "query_blind" in fails_in_one_line(collect_trace, model, _example(model), "query_blind")


@pytest.mark.parametrize("name", ["num_train_samples", "num_heldout_samples", "samples_per_fragment"])
def test_counts_are_at_least_one(fails_in_one_line, name):
    assert f"{name} is 0" in fails_in_one_line(CollectConfig, **{name: 0})


def test_the_setting_is_checked_when_it_is_chosen(fails_in_one_line):
    assert "query_blind" in fails_in_one_line(CollectConfig, setting="query_blind")


def test_attention_that_is_not_finite_names_the_sample(tiny_model_folder, fails_in_one_line):
    model = load_language_model(tiny_model_folder("llama"), dtype="float32")
    with torch.no_grad():
        model.network.model.layers[0].self_attn.k_proj.weight[0, 0] = torch.nan
    example = _example(model)
    message = fails_in_one_line(collect_trace, model, example, "query_agnostic")
    assert example.sample.sample_id in message and "weights are damaged" in message
