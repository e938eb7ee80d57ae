"""Greedy decoding on compacted caches against transformers' own `generate`."""

import copy
import dataclasses

import pytest
import torch
from tokenizers import AddedToken

from kvpolicy.attention.prefill import prefill
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.decoding import decode_greedily

NUM_CONTEXT, NUM_NEW = 20, 24


def _start(model, tokens, rows=1):
    """A cache of everything but nothing more, and the first new token."""
    context = prefill(model, tokens, num_queries=0)
    everything = torch.arange(tokens.shape[0]).expand(model.spec.num_heads, -1)
    cache = CompactedCache(
        context.keys,
        context.values,
        [everything] * rows,
        num_kv_heads=model.spec.num_kv_heads,
        num_new_tokens=NUM_NEW,
    )
    return cache, context.logits[-1:].argmax(dim=-1).expand(rows)


def _generated(network, tokens, **options):
    with torch.no_grad():
        out = network.generate(
            tokens[None],
            attention_mask=torch.ones_like(tokens[None]),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            **options,
        )
    return out[0, tokens.shape[0] :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_a_full_cache_says_what_generate_says(tiny_model, eager_network, draw_tokens, family):
    model = tiny_model(family)
    for seed in range(2):
        tokens = draw_tokens(NUM_CONTEXT, seed=seed)
        cache, first = _start(model, tokens)
        found = decode_greedily(model, cache, first, first_position=NUM_CONTEXT, max_new_tokens=NUM_NEW)[0]
        expected = _generated(eager_network(family), tokens)
        if model.tokenizer.eos_token_id in expected:
            expected = expected[: expected.index(model.tokenizer.eos_token_id)]
        assert found == expected


def test_rows_end_each_at_its_own_end(tiny_model, draw_tokens, monkeypatch):
    # Some token of the answer is declared to end it; nothing after it may be in the answer.
    model, tokens = tiny_model("llama"), draw_tokens(NUM_CONTEXT)
    cache, first = _start(model, tokens)
    whole = decode_greedily(model, cache, first, first_position=NUM_CONTEXT, max_new_tokens=NUM_NEW)[0]
    end = whole[10]
    monkeypatch.setattr(model.network.generation_config, "eos_token_id", [end, model.tokenizer.eos_token_id])
    cache, first = _start(model, tokens, rows=2)
    rows = torch.stack([first[0], torch.tensor(end)])  # the second has ended before it began
    found = decode_greedily(model, cache, rows, first_position=NUM_CONTEXT, max_new_tokens=NUM_NEW)
    assert found == [whole[: whole.index(end)], []]


def test_what_the_template_ends_a_turn_with_ends_an_answer(tiny_model, draw_tokens):
    # Some token of the answer is what the template ends turns with, though not the tokenizer's end of text.
    model, tokens = tiny_model("llama"), draw_tokens(NUM_CONTEXT)
    cache, first = _start(model, tokens)
    whole = decode_greedily(model, cache, first, first_position=NUM_CONTEXT, max_new_tokens=NUM_NEW)[0]
    end = next(token for token in whole[5:] if token < 256)
    tokenizer = copy.deepcopy(model.tokenizer)
    name = tokenizer.convert_ids_to_tokens(end)
    tokenizer.add_tokens([AddedToken(name, normalized=False)])
    assert tokenizer.convert_tokens_to_ids(name) == end not in tokenizer.all_special_ids
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", name)
    cache, first = _start(model, tokens)
    ending = dataclasses.replace(model, tokenizer=tokenizer)
    found = decode_greedily(ending, cache, first, first_position=NUM_CONTEXT, max_new_tokens=NUM_NEW)[0]
    assert found == whole[: whole.index(end)]


def test_at_most_so_many_tokens_and_no_more_passes_than_needed(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_CONTEXT)
    for most in (1, 2, 9):
        cache, first = _start(model, tokens)
        found = decode_greedily(model, cache, first, first_position=NUM_CONTEXT, max_new_tokens=most)[0]
        assert len(found) == most
        assert cache.num_past_tokens == NUM_CONTEXT + most - 1


def test_settled_rows_stop_early_but_only_when_all_are(tiny_model, draw_tokens):
    model, tokens = tiny_model("llama"), draw_tokens(NUM_CONTEXT)
    cache, first = _start(model, tokens)
    whole = decode_greedily(model, cache, first, first_position=NUM_CONTEXT, max_new_tokens=NUM_NEW)[0]
    cache, first = _start(model, tokens)
    early = decode_greedily(
        model,
        cache,
        first,
        first_position=NUM_CONTEXT,
        max_new_tokens=NUM_NEW,
        is_settled=lambda row, found: whole[2] in found,
    )[0]
    assert early == whole[: len(early)] and 3 <= len(early) < NUM_NEW
