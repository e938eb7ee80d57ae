"""Every path of the registered attention against eager attention, and what a session leaves behind: nothing."""

from inspect import signature

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvpolicy.attention.session as module
from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.session import ATTENTION_NAME, attention_session, register_attention
from kvpolicy.errors import InputError
from kvpolicy.inference.cache import CompactedCache

FAMILIES = ("llama", "llama_mha", "qwen2", "qwen3", "phi3", "mistral", "gemma", "gemma2")
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


def _eager_logits(network, token_ids):
    with torch.no_grad():
        return network(input_ids=token_ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_session_it_is_plain_attention(tiny_model, eager_network, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(2, 30)
    assert model.network.config._attn_implementation == ATTENTION_NAME
    logits = model.logits(tokens, torch.arange(30).expand(2, -1), 30)
    torch.testing.assert_close(logits, _eager_logits(eager_network(family), tokens), **TOLERANCE)


def test_the_registered_function_has_the_signature_of_transformers_own():
    register_attention()  # again: registering anew must not bring another one back
    ours, sdpa = (
        [(parameter.name, parameter.kind, parameter.default) for parameter in signature(function).parameters.values()]
        for function in (ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME], sdpa_attention_forward)
    )
    num_named = len(ours) - 1
    assert [name for name, *_ in ours[:num_named]][-2:] == ["dropout", "scaling"]
    assert ours == [*sdpa[:num_named], sdpa[-1]]  # the rest by keyword


def test_registered_functions_may_be_wrapped_and_called_by_position(tiny_model, draw_tokens, monkeypatch):
    model, tokens = tiny_model("llama"), draw_tokens(1, 20)
    expected = model.logits(tokens, torch.arange(20)[None], 20)
    wrapped = []

    def wrap(name):
        function = ALL_ATTENTION_FUNCTIONS[name]

        def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
            wrapped.append(name)
            return function(module, query, key, value, attention_mask, dropout, **kwargs)

        return wrapper

    wrappers = {name: wrap(name) for name in (ATTENTION_NAME, "sdpa")}
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", wrappers)
    assert torch.equal(model.logits(tokens, torch.arange(20)[None], 20), expected)
    assert wrapped == [ATTENTION_NAME, "sdpa"] * model.spec.num_layers  # SDPA is the one that is registered
    wrapped.clear()
    torch.testing.assert_close(prefill(model, tokens[0], num_queries=1, num_logits=20).logits, expected[0], **TOLERANCE)
    assert wrapped == [ATTENTION_NAME] * model.spec.num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_session_a_cache_of_transformers_works(tiny_model, eager_network, draw_tokens, family):
    # The trap: with fewer queries than keys and no mask, SDPA's causal flag is aligned to the top left.
    network, tokens = tiny_model(family).network, draw_tokens(1, 30)
    past = "cache" if "cache" in signature(network.forward).parameters else "past_key_values"  # by release
    with torch.no_grad():
        first = network(input_ids=tokens[:, :20], use_cache=True)
        second = network(input_ids=tokens[:, 20:27], use_cache=True, **{past: first.past_key_values})
        third = network(input_ids=tokens[:, 27:28], use_cache=True, **{past: second.past_key_values})
    expected = _eager_logits(eager_network(family), tokens)
    torch.testing.assert_close(second.logits, expected[:, 20:27], **TOLERANCE)
    torch.testing.assert_close(third.logits, expected[:, 27:28], **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_without_a_session_padding_is_hidden(tiny_model, eager_network, draw_tokens, family):
    tokens = draw_tokens(1, 20)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), tokens], dim=1)
    mask = torch.tensor([[0] * 5 + [1] * 20])
    positions = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.arange(20)[None]], dim=1)
    with torch.no_grad():
        logits = (
            tiny_model(family)
            .network(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False)
            .logits
        )
    torch.testing.assert_close(logits[:, 5:], _eager_logits(eager_network(family), tokens), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recording_prefill_gives_the_models_logits_and_cache(tiny_model, eager_network, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(30)
    whole = prefill(model, tokens, num_queries=7, num_logits=30)
    network = eager_network(family)
    torch.testing.assert_close(whole.logits, _eager_logits(network, tokens[None])[0], **TOLERANCE)
    with torch.no_grad():
        cache = network(input_ids=tokens[None], use_cache=True).past_key_values
    keys = torch.cat([layer.keys[0] for layer in cache.layers])
    values = torch.cat([layer.values[0] for layer in cache.layers])
    torch.testing.assert_close(whole.keys, keys, **TOLERANCE)
    torch.testing.assert_close(whole.values, values, **TOLERANCE)
    assert whole.queries.shape == (model.spec.num_heads, model.spec.group_size, 7, model.spec.head_dim)
    assert (whole.num_tokens, whole.first_query, whole.num_kv_heads) == (30, 23, model.spec.num_kv_heads)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_compacted_cache_continues_as_the_model_would(tiny_model, eager_network, draw_tokens, family):
    # Question, then answer, then token by token: every pass has fewer queries than keys.
    model, tokens = tiny_model(family), draw_tokens(40)
    expected = _eager_logits(eager_network(family), tokens[None])[0]
    context = prefill(model, tokens[:22], num_queries=0)
    everything = torch.arange(22).expand(model.spec.num_heads, -1)
    cache = CompactedCache(
        context.keys, context.values, [everything], num_kv_heads=model.spec.num_kv_heads, num_new_tokens=18
    )
    for first, last in [(22, 30), (30, 37), (37, 38), (38, 39), (39, 40)]:
        logits = cache.run(model, tokens[None, first:last], torch.arange(first, last)[None], num_logits=last - first)
        torch.testing.assert_close(logits[0], expected[first:last], **TOLERANCE)


@pytest.mark.parametrize("num_bytes", [1, 3_000])
def test_capped_attention_is_the_same_in_blocks_of_any_size(tiny_model, draw_tokens, monkeypatch, num_bytes):
    model, tokens = tiny_model("gemma2"), draw_tokens(30)

    def run():
        context = prefill(model, tokens[:22], num_queries=0, num_logits=22)
        few = torch.arange(22)[::2].expand(model.spec.num_heads, -1)
        cache = CompactedCache(
            context.keys, context.values, [few], num_kv_heads=model.spec.num_kv_heads, num_new_tokens=8
        )
        return context.logits, cache.run(model, tokens[None, 22:], torch.arange(22, 30)[None], num_logits=8)

    expected = run()
    monkeypatch.setattr(module, "_CAPPED_BYTES", num_bytes)
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_num_logits_are_those_of_the_last_tokens(tiny_model, eager_network, draw_tokens):
    tokens = draw_tokens(30)
    whole = prefill(tiny_model("llama"), tokens, num_queries=0, num_logits=4)
    torch.testing.assert_close(whole.logits, _eager_logits(eager_network("llama"), tokens[None])[0, -4:], **TOLERANCE)


def test_queries_before_a_position_are_a_view(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(30)
    all_queries = prefill(model, tokens, num_queries=30).queries
    whole = prefill(model, tokens, num_queries=12)
    assert torch.equal(whole.queries_before(25, 4), all_queries[:, :, 21:25])
    assert torch.equal(whole.queries_before(25, 30), all_queries[:, :, 18:25])  # as many as there are
    assert whole.queries_before(18, 5).shape[2] == 0
    assert whole.queries_before(30, 12).data_ptr() == whole.queries.data_ptr()


def test_queries_beyond_the_sequence_are_not_invented(tiny_model, draw_tokens):
    assert prefill(tiny_model("llama"), draw_tokens(5), num_queries=100).queries.shape[2] == 5


class _Failing:
    num_positions = 3

    def attend(self, layer, query, key, value, scaling):
        raise RuntimeError("stop here")


def test_an_error_inside_a_session_leaves_nothing_behind(tiny_model, eager_network, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(1, 20)
    positions = torch.arange(20)[None]
    with pytest.raises(RuntimeError, match="stop here"), attention_session(_Failing()):
        model.logits(tokens, positions, 1)
    assert module._active_session.get() is None
    torch.testing.assert_close(
        model.logits(tokens, positions, 20), _eager_logits(eager_network("llama"), tokens), **TOLERANCE
    )


def test_an_error_on_a_cache_leaves_it_usable(tiny_model, eager_network, draw_tokens, fails_in_one_line):
    model, tokens = tiny_model("llama"), draw_tokens(20)
    context = prefill(model, tokens[:12], num_queries=0)
    cache = CompactedCache(
        context.keys,
        context.values,
        [torch.arange(12).expand(model.spec.num_heads, -1)],
        num_kv_heads=model.spec.num_kv_heads,
        num_new_tokens=8,
    )
    fails_in_one_line(cache.run, model, tokens[None, 12:], torch.arange(1_012, 1_020)[None], num_logits=8)
    assert module._active_session.get() is None
    assert cache.num_past_tokens == 12
    logits = cache.run(model, tokens[None, 12:], torch.arange(12, 20)[None], num_logits=8)
    torch.testing.assert_close(logits[0], _eager_logits(eager_network("llama"), tokens[None])[0, 12:], **TOLERANCE)


def test_sessions_nest(tiny_model, draw_tokens):
    outer, inner = _Failing(), _Failing()
    with attention_session(outer):
        with attention_session(inner):
            assert module._active_session.get() is inner
        assert module._active_session.get() is outer


def test_tokens_beyond_the_sliding_window_are_refused(tiny_model, draw_tokens, fails_in_one_line):
    model = tiny_model("mistral", sliding_window=16)
    assert "window of 16 tokens" in fails_in_one_line(prefill, model, draw_tokens(17), num_queries=1)
    assert prefill(model, draw_tokens(16), num_queries=1).num_tokens == 16


def test_a_cache_that_grows_past_the_sliding_window_is_refused(tiny_model, draw_tokens, fails_in_one_line):
    model, tokens = tiny_model("mistral", sliding_window=16), draw_tokens(20)
    context = prefill(model, tokens[:14], num_queries=0)
    cache = CompactedCache(
        context.keys,
        context.values,
        [torch.arange(14).expand(model.spec.num_heads, -1)],
        num_kv_heads=model.spec.num_kv_heads,
        num_new_tokens=6,
    )
    cache.run(model, tokens[None, 14:16], torch.arange(14, 16)[None], num_logits=1)
    assert "window of 16" in fails_in_one_line(
        cache.run, model, tokens[None, 16:17], torch.arange(16, 17)[None], num_logits=1
    )


def test_attention_that_importance_does_not_follow_is_refused(tiny_model):
    states = torch.zeros(1, 4, 3, 16)
    layer = tiny_model("llama").network.model.layers[0].self_attn
    with attention_session(_Failing()), pytest.raises(InputError, match="not supported"):
        module._attention(layer, states, states[:, :2], states[:, :2], None, s_aux=torch.ones(1))


def test_positions_beyond_the_models_are_refused(tiny_model, draw_tokens, fails_in_one_line):
    model = tiny_model("llama", max_position_embeddings=32)
    prefill(model, draw_tokens(32), num_queries=0)
    message = fails_in_one_line(prefill, model, draw_tokens(33), num_queries=0)
    assert "position 32" in message and "32 positions" in message


def test_a_layer_without_attention_is_an_error_and_never_empty_memory(tiny_model, monkeypatch):
    model = tiny_model("llama")
    layer = model.network.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **kwargs: hidden_states)
    with pytest.raises(InputError, match=r"layers 1 of .* ran no attention"):
        prefill(model, torch.arange(5), num_queries=1)


def test_a_layer_that_calls_attention_twice_is_refused(tiny_model, monkeypatch):
    model = tiny_model("llama")
    attention = model.network.model.layers[2].self_attn
    forward = attention.forward

    def twice(*args, **kwargs):
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", twice)
    with pytest.raises(InputError, match=r"layers 2 of 3 ran attention more than once"):
        prefill(model, torch.arange(5), num_queries=1)
