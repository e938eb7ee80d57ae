"""What a model computes otherwise on long sequences: frequencies that change (LongRoPE) and sliding windows.

Either everything agrees with transformers, or it is refused in one line before anything runs.
"""

import dataclasses
from itertools import product

import pytest
import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.probe import run_probe
from kvpolicy.evaluation import Contender, evaluate_example
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.generation import compressed_generate
from kvpolicy.inference.streaming import StreamedCaches, StreamedRow
from kvpolicy.methods.registry import make_method
from kvpolicy.methods.streaming_llm import StreamingLLM
from kvpolicy.text.encoded_sample import encode, encode_message
from kvpolicy.text.protocol import cut_sample
from kvpolicy.text.sample import Sample
from kvpolicy.training.collection import collect_trace
from kvpolicy.training.soft_token_training import SoftTokenConfig, attention_loss, make_lesson
from tests.conftest import OTHER_FAMILIES
from tests.drawn_policy import draw_policy

LONG, CHANGE = "phi3_longrope", 128
WINDOWED, WINDOW = "mistral_window", 128
CONTENDERS = ("full", "streaming_llm", "expected_attention")
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def model(tiny_model):
    return dataclasses.replace(tiny_model(LONG), digest="0" * 64)


@pytest.fixture(scope="module")
def windowed(tiny_model):
    return dataclasses.replace(tiny_model(WINDOWED), digest="0" * 64)


def _logits(network, tokens):
    with torch.no_grad():
        return network(input_ids=tokens[None], use_cache=False).logits[0]


def _text(model, num_tokens):
    """A message whose prompt has so many tokens, one a byte."""
    around = len(encode_message("x", model.tokenizer)) - 1
    words = ("The pass key is 4821. " * 30)[: num_tokens - around - 1].rstrip()
    return words + "?" * (num_tokens - around - len(words))


def _answer(network, model, prompt, num_new):
    ids = torch.tensor([encode_message(prompt, model.tokenizer)])
    with torch.no_grad():
        whole = network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new)
    answer = whole[0, ids.shape[1] :].tolist()
    end = model.tokenizer.eos_token_id
    return tuple(answer[: answer.index(end)] if end in answer else answer)


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", LONG])
def test_only_longrope_changes_with_the_length(tiny_model, family):
    assert tiny_model(family).change_tokens == (CHANGE if family == LONG else None)


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3"}]
)
def test_dynamic_frequencies_change_beyond_the_positions_only(tiny_model, eager_network, draw_tokens, rope):
    if rope["rope_type"] == "llama3":
        rope |= {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope["rope_type"] != "dynamic":
        rope |= {"original_max_position_embeddings": 64}
    options = {"rope_parameters": rope | {"rope_theta": 10_000.0}, "max_position_embeddings": 128}
    model, tokens = tiny_model("llama", **options), draw_tokens(128)
    assert model.change_tokens is None
    caches = StreamedCaches(model, [StreamedRow(method=StreamingLLM(), budget=128)], interval_tokens=50)
    logits = caches.run(model, tokens[None], torch.arange(128)[None], num_logits=128)
    torch.testing.assert_close(logits[0], _logits(eager_network("llama", **options), tokens), **TOLERANCE)


def test_equal_factors_do_not_change(tiny_model):
    rope = dict(OTHER_FAMILIES[LONG][1]["rope_parameters"], long_factor=[1.0] * 8)
    assert tiny_model(LONG, rope_parameters=rope).change_tokens is None


@pytest.mark.parametrize("num_tokens", [CHANGE - 1, CHANGE, CHANGE + 1, 200])
@pytest.mark.parametrize("chunk_tokens", [1, 50, 128, 500])
def test_whole_and_in_chunks_agree_with_transformers_on_both_sides(
    model, eager_network, draw_tokens, num_tokens, chunk_tokens
):
    tokens = draw_tokens(num_tokens)
    expected = _logits(eager_network(LONG), tokens)
    whole = prefill(model, tokens, num_queries=0, num_logits=num_tokens)
    torch.testing.assert_close(whole.logits, expected, **TOLERANCE)
    own = model.for_sequence(num_tokens)
    caches = StreamedCaches(own, [StreamedRow(method=StreamingLLM(), budget=num_tokens)], interval_tokens=chunk_tokens)
    logits = caches.run(own, tokens[None], torch.arange(num_tokens)[None], num_logits=num_tokens)
    torch.testing.assert_close(logits[0], expected, **TOLERANCE)
    assert not model.decoder.rotary_emb._forward_hooks and not model.decoder.rotary_emb._forward_pre_hooks


def test_passes_beyond_the_length_of_their_sequence_are_refused(model, draw_tokens, fails_in_one_line):
    tokens = draw_tokens(140)
    caches = StreamedCaches(model, [StreamedRow(method=StreamingLLM(), budget=140)], interval_tokens=64)
    caches.run(model, tokens[None, :CHANGE], torch.arange(CHANGE)[None], num_logits=1)
    for own in (model, model.for_sequence(CHANGE)):
        message = fails_in_one_line(
            caches.run, own, tokens[None, CHANGE:], torch.arange(CHANGE, 140)[None], num_logits=1
        )
        assert "position 139 is beyond the 128 tokens" in message and "LongRoPE" in message


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 40}, {"evict_every_tokens": 5}])
@pytest.mark.parametrize(("num_prompt", "num_new"), [(100, 28), (129, 20), (200, 60)])
def test_answers_on_one_side_are_those_of_transformers(model, eager_network, num_prompt, num_new, options):
    prompt = _text(model, num_prompt)
    answer = compressed_generate(model, draw_policy(model), prompt, budget=None, max_new_tokens=num_new, **options)
    assert answer.num_prompt_tokens == num_prompt
    assert answer.token_ids == _answer(eager_network(LONG), model, prompt, num_new)


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 32, "budget": 64}])
def test_answers_across_the_change_are_refused_before_anything_runs(model, monkeypatch, fails_in_one_line, options):
    monkeypatch.setattr(type(model), "logits", None)
    message = fails_in_one_line(
        compressed_generate,
        model,
        draw_policy(model),
        _text(model, 109),
        **({"budget": None} | options),
        max_new_tokens=60,
    )
    assert "109 tokens and the answer may have 60" in message and "change after 128 tokens (LongRoPE)" in message


def test_prompts_of_both_sides_are_answered_as_each_would_be_alone(model):
    prompts = [_text(model, 150), _text(model, 60), _text(model, 170)]
    together = compressed_generate(model, draw_policy(model), prompts, budget=64, max_new_tokens=20)
    for prompt, answer in zip(prompts, together, strict=True):
        alone = compressed_generate(model, draw_policy(model), prompt, budget=64, max_new_tokens=20)
        assert answer.token_ids == alone.token_ids and answer.num_prompt_tokens == alone.num_prompt_tokens


def _example(model, num_context, *, num_answer=20):
    return encode(
        Sample(
            sample_id="ruler/niah_single_1/test/0/0/200",
            benchmark="ruler",
            task="niah_single_1",
            split="test",
            context=("The pass key is 4821. " * 30)[:num_context],
            question=" What is it?",
            answer_prefix=" It is",
            answer=(" 4821, as I said." * 9)[:num_answer],
            references=("4821",),
            max_new_tokens=24,
        ),
        model.tokenizer,
    )


def _sides(model):
    """Contexts of an example that is below the change with all that follows, across it, and beyond it."""
    around = len(_example(model, 50).context_ids) + len(_example(model, 50).question_ids) - 50
    return CHANGE - around - 24, CHANGE - around - 5, CHANGE - around + 1


@pytest.mark.parametrize("chunk_tokens", [None, 40])
def test_examples_are_judged_on_one_side_and_refused_across(model, fails_in_one_line, chunk_tokens):
    below, across, beyond = _sides(model)
    contenders = [
        Contender(method=make_method(name), seed=0) for name in ("full", "streaming_llm", "expected_attention")
    ]
    for num_context, setting in product((below, beyond), ("query_agnostic", "query_aware")):
        example = _example(model, num_context)
        everything = cut_sample(example, setting).num_context  # so that every cache is the full one
        options = {"settings": (setting,), "chunk_tokens": chunk_tokens}
        result = evaluate_example(model, example, contenders, [everything], **options)
        divergence = [score.value for score in result.scores if score.metric == "kl"]
        assert len(divergence) == 3 and max(divergence) < 1e-6
    message = fails_in_one_line(
        evaluate_example, model, _example(model, across), contenders, [64], chunk_tokens=chunk_tokens
    )
    assert "sample ruler/niah_single_1/test/0/0/200" in message and "change after 128 tokens" in message


def test_traces_are_one_pass_of_any_length(model, eager_network):
    _, across, _ = _sides(model)
    example = _example(model, across)
    tokens = torch.tensor(example.context_ids + example.question_ids + example.answer_ids)
    trace = collect_trace(model, example, "query_agnostic")
    with torch.no_grad():
        output = eager_network(LONG)(input_ids=tokens[None], use_cache=True)
    keys = torch.cat([layer.keys[0] for layer in output.past_key_values.layers])
    torch.testing.assert_close(trace.keys, keys[:, : len(example.context_ids)], **TOLERANCE)


def test_soft_tokens_take_the_frequencies_of_their_context(model, draw_tokens, fails_in_one_line):
    below, across, beyond = _sides(model)
    config = SoftTokenConfig(num_tokens=4)
    embeddings = model.embedding_table[:4].clone()
    for num_context in (below, beyond):
        lesson = make_lesson(model, _example(model, num_context), "query_agnostic", config)
        assert bool(attention_loss(model, lesson, embeddings).isfinite())
    assert "LongRoPE" in fails_in_one_line(make_lesson, model, _example(model, across), "query_agnostic", config)
    # A probe is a continuation: with the embeddings of tokens it has the keys that these would have.
    tokens = draw_tokens(140)
    whole = prefill(model, tokens, num_queries=0)
    probe = run_probe(
        model.for_sequence(140), whole.keys[:, :90], whole.values[:, :90], model.embedding_table[tokens[90:110]]
    )
    torch.testing.assert_close(probe.keys, whole.keys[:, 90:110], **TOLERANCE)


def test_windows_are_known(tiny_model):
    windows = {
        family: tiny_model(family).window for family in ("llama", "mistral", "mistral_window", "gemma2", "gemma3")
    }
    assert windows == {"llama": None, "mistral": None, "mistral_window": 128, "gemma2": 128, "gemma3": 128}
    assert tiny_model("gemma3", layer_types=["full_attention"] * 3).window is None


@pytest.mark.parametrize("family", [WINDOWED, "gemma2", "gemma3"])
def test_a_window_counts_positions_and_not_what_is_left_in_a_cache(tiny_model, family, draw_tokens, fails_in_one_line):
    model, tokens = tiny_model(family), draw_tokens(WINDOW + 1)
    caches = StreamedCaches(model, [StreamedRow(method=StreamingLLM(), budget=20)], interval_tokens=16)
    caches.run(model, tokens[None, :WINDOW], torch.arange(WINDOW)[None], num_logits=1)
    assert caches.num_held(0) == 20
    message = fails_in_one_line(caches.run, model, tokens[None, WINDOW:], torch.tensor([[WINDOW]]), num_logits=1)
    assert "position 128 is beyond the sliding window of 128 tokens" in message
    whole = prefill(model, tokens[:WINDOW], num_queries=0)
    few = torch.arange(20).expand(model.spec.num_heads, -1)
    cache = CompactedCache(whole.keys, whole.values, [few], num_kv_heads=whole.num_kv_heads, num_new_tokens=4)
    assert "window of 128" in fails_in_one_line(
        cache.run, model, tokens[None, WINDOW:], torch.tensor([[WINDOW]]), num_logits=1
    )
    assert "window of 128" in fails_in_one_line(
        run_probe, model, whole.keys[:, :20], whole.values[:, :20], model.embedding_table[:2], first_position=127
    )


@pytest.mark.parametrize("options", [{"budget": None}, {"budget": 64}, {"budget": 64, "chunk_tokens": 32}])
@pytest.mark.parametrize(("num_prompt", "num_new"), [(419, 4), (120, 20)])
def test_answers_beyond_a_window_are_refused_before_anything_runs(
    windowed, monkeypatch, fails_in_one_line, options, num_prompt, num_new
):
    monkeypatch.setattr(type(windowed), "logits", None)
    message = fails_in_one_line(
        compressed_generate,
        windowed,
        draw_policy(windowed),
        _text(windowed, num_prompt),
        max_new_tokens=num_new,
        **options,
    )
    assert f"{num_prompt} tokens" in message and "sliding window of 128 tokens" in message


def test_answers_within_a_window_are_those_of_transformers(windowed, eager_network):
    prompt = _text(windowed, 108)
    answer = compressed_generate(windowed, draw_policy(windowed), prompt, budget=None, max_new_tokens=20)
    assert answer.token_ids == _answer(eager_network(WINDOWED), windowed, prompt, 20)
