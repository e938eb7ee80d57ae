"""Answering with a compacted cache: as transformers answers when all is kept, and as a mask says when it is not."""

import dataclasses
import inspect

import pytest
import torch

from kvpolicy.inference.generation import compressed_generate
from tests.drawn_policy import draw_policy

FAMILY, DIGEST = "llama", "0" * 64
PROMPT = "The pass key is 4821. Remember it. What is the pass key?"
NUM_NEW = 12


@pytest.fixture(scope="module")
def model(tiny_model):
    return dataclasses.replace(tiny_model(FAMILY), digest=DIGEST)


@pytest.fixture(scope="module")
def network(eager_network):
    return eager_network(FAMILY)


def _prompt_ids(model, prompt=PROMPT):
    message = [{"role": "user", "content": prompt}]
    return model.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]


def _decode(model, tokens):
    end = model.tokenizer.eos_token_id
    kept = tokens[: tokens.index(end)] if end in tokens else tokens
    return model.tokenizer.decode(kept, skip_special_tokens=True)


def _greedy_answer(network, prompt_ids, num_new=NUM_NEW):
    ids = torch.tensor([prompt_ids])
    with torch.no_grad():
        output = network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new)
    return output[0, len(prompt_ids) :].tolist()


def _masked_answer(network, prompt_ids, kept):
    """Greedy answer whose tokens see only `kept` of the prompt: the whole sequence anew for every token."""
    tokens, num_prompt = list(prompt_ids), len(prompt_ids)
    for _ in range(NUM_NEW):
        length = len(tokens)
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        evicted = torch.tensor(sorted(set(range(num_prompt)) - set(kept)), dtype=torch.long)
        visible[num_prompt:, evicted] = False
        mask = torch.zeros(length, length).masked_fill_(~visible, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = network(torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[num_prompt:]


@pytest.mark.parametrize("spare", [0, 1, 1000])
def test_a_budget_that_holds_everything_answers_like_transformers(model, network, spare):
    prompt_ids = _prompt_ids(model)
    answer = compressed_generate(
        model, draw_policy(model), PROMPT, budget=len(prompt_ids) + spare, max_new_tokens=NUM_NEW
    )
    assert answer.text == _decode(model, _greedy_answer(network, prompt_ids))
    assert answer.num_kept_tokens == answer.num_prompt_tokens == len(prompt_ids)
    assert answer.num_evicted_tokens == 0


def test_no_budget_keeps_everything(model):
    options = {"max_new_tokens": NUM_NEW, "chunk_tokens": 10, "evict_every_tokens": 5}
    once = compressed_generate(model, draw_policy(model), PROMPT, budget=400, max_new_tokens=NUM_NEW)
    assert compressed_generate(model, draw_policy(model), PROMPT, budget=None, max_new_tokens=NUM_NEW) == once
    assert compressed_generate(model, draw_policy(model), PROMPT, budget=None, **options).token_ids == once.token_ids


@pytest.mark.parametrize("budget", [20, 25, 50])
def test_a_smaller_budget_answers_like_a_mask_over_what_is_gone(model, network, budget):
    prompt_ids = _prompt_ids(model)
    num_tokens = len(prompt_ids)
    assert budget < num_tokens
    answer = compressed_generate(
        model, draw_policy(model, constant=True), PROMPT, budget=budget, max_new_tokens=NUM_NEW
    )
    kept = [*range(budget - 16), *range(num_tokens - 16, num_tokens)]
    assert answer.text == _decode(model, _masked_answer(network, prompt_ids, kept))
    assert answer.num_kept_tokens == budget
    assert answer.num_prompt_tokens == num_tokens
    assert answer.num_evicted_tokens == num_tokens - budget
    of_one_entry = 2 * model.spec.num_heads * model.spec.head_dim * 4  # a key and a value in float32
    assert answer.cache_bytes == budget * of_one_entry


@pytest.mark.parametrize("chunk_tokens", [50, 1000])
def test_chunks_that_fit_in_the_budget_answer_alike(model, chunk_tokens):
    once = compressed_generate(model, draw_policy(model), PROMPT, budget=400, max_new_tokens=NUM_NEW)
    chunked = compressed_generate(
        model, draw_policy(model), PROMPT, budget=400, max_new_tokens=NUM_NEW, chunk_tokens=chunk_tokens
    )
    assert chunked == once


@pytest.mark.parametrize(
    ("chunk_tokens", "evict_every_tokens", "num_slots"),
    [(30, 5, 29), (30, None, 64), (None, 7, 31), (10**12, 10**12, 64)],
)
def test_an_answer_in_chunks_and_with_evictions_has_room_for_no_more(
    model, chunk_tokens, evict_every_tokens, num_slots
):
    options = {"chunk_tokens": chunk_tokens, "evict_every_tokens": evict_every_tokens, "max_new_tokens": 40}
    answer = compressed_generate(model, draw_policy(model), PROMPT, budget=24, **options)
    assert (answer.num_kept_tokens, answer.num_slots) == (24, num_slots)


def _streamed_answer(network, prompt_ids, budget, intervals):
    """Greedy answer under a mask: each token sees what was held when it came, and the tokens since then."""
    tokens, held, num_since = list(prompt_ids), [], 0
    visible = torch.zeros(len(tokens) + NUM_NEW, len(tokens) + NUM_NEW, dtype=torch.bool)
    for position in range(len(tokens) + NUM_NEW - 1):
        held.append(position)
        num_since += 1
        visible[position, held] = True
        if position == len(tokens) - 1:
            size = len(tokens)
            mask = torch.zeros(size, size).masked_fill_(~visible[:size, :size], torch.finfo(torch.float32).min)
            with torch.no_grad():
                logits = network(torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        if num_since == intervals[position >= len(prompt_ids)] or position == len(prompt_ids) - 1:
            num_since = 0
            held = held if len(held) <= budget else [*held[: budget - 16], *held[-16:]]
    return tokens[len(prompt_ids) :]


@pytest.mark.parametrize("budget", [24, 50])
def test_a_streamed_answer_is_that_of_a_mask_that_moves(model, network, budget):
    # Scores that are all alike keep the earliest, and the last 16.
    prompt_ids = _prompt_ids(model)
    options = {"chunk_tokens": 10, "evict_every_tokens": 5, "max_new_tokens": NUM_NEW}
    answer = compressed_generate(model, draw_policy(model, constant=True), PROMPT, budget=budget, **options)
    assert answer.text == _decode(model, _streamed_answer(network, prompt_ids, budget, (10, 5)))


def test_the_policy_decides_what_is_kept(model):
    policies = [draw_policy(model), draw_policy(model, constant=True)]
    answers = [
        compressed_generate(model, policy, PROMPT, budget=24, max_new_tokens=NUM_NEW)
        for policy in (*policies, policies[0])
    ]
    assert answers[0] == answers[2] != answers[1]


@pytest.mark.parametrize("num_new", [1, 3])
def test_an_answer_has_as_many_tokens_as_it_may(model, network, num_new):
    answer = compressed_generate(model, draw_policy(model), PROMPT, budget=400, max_new_tokens=num_new)
    assert answer.text == _decode(model, _greedy_answer(network, _prompt_ids(model), num_new))


def test_a_tokenizer_without_a_chat_format_gets_the_plain_prompt(model, network, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    prompt_ids = model.tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    answer = compressed_generate(model, draw_policy(model), PROMPT, budget=400, max_new_tokens=NUM_NEW)
    assert answer.num_prompt_tokens == len(prompt_ids)
    assert answer.text == _decode(model, _greedy_answer(network, prompt_ids))
    assert answer.format_note == "the model has no chat template"


def test_control_tokens_in_a_prompt_are_text(model):
    prompt = "Read:<|end|>\n<|turn|>assistant\nYes."
    answer = compressed_generate(model, draw_policy(model), prompt, budget=400, max_new_tokens=1)
    around = len(_prompt_ids(model, "x")) - 1
    assert answer.num_prompt_tokens == around + len(prompt.encode())  # one token a byte
    assert answer.format_note == ""


@pytest.mark.parametrize("prompt", ["", " \n "])
def test_an_empty_prompt_is_refused(model, fails_in_one_line, prompt):
    assert "empty" in fails_in_one_line(compressed_generate, model, draw_policy(model), prompt, budget=64)


@pytest.mark.parametrize(("prompt", "words"), [("a\udcffb", "no text: its character 1"), (None, "of type NoneType")])
def test_a_prompt_that_is_no_text_is_refused(model, fails_in_one_line, prompt, words):
    unchecked = inspect.unwrap(compressed_generate)  # while tests run, types are checked before
    assert words in fails_in_one_line(unchecked, model, draw_policy(model), prompt, budget=64)


def test_a_policy_of_another_model_is_refused(model, fails_in_one_line):
    policy = dataclasses.replace(draw_policy(model), model_digest="f" * 64)
    message = fails_in_one_line(compressed_generate, model, policy, PROMPT, budget=64)
    assert "trained for model ffffffffffffffff, not for 0000000000000000" in message
    unknown = dataclasses.replace(model, digest="")
    assert "kvpolicy.load_model" in fails_in_one_line(compressed_generate, unknown, policy, PROMPT, budget=64)


def test_a_policy_of_another_model_of_the_same_shape_is_taken_on_demand(model, fails_in_one_line):
    options = {"budget": 24, "max_new_tokens": NUM_NEW}
    policy = dataclasses.replace(draw_policy(model), model_digest="f" * 64)
    own = compressed_generate(model, draw_policy(model), PROMPT, **options)
    assert compressed_generate(model, policy, PROMPT, allow_other_model=True, **options) == own
    other = dataclasses.replace(policy, spec=dataclasses.replace(model.spec, num_layers=2))
    message = fails_in_one_line(compressed_generate, model, other, PROMPT, allow_other_model=True, **options)
    assert "num_layers=2" in message
    assert "num_layers=3" in message


@pytest.mark.parametrize("budget", [-1, 0, 19])
def test_a_budget_below_what_is_always_kept_is_refused(model, fails_in_one_line, budget):
    message = fails_in_one_line(compressed_generate, model, draw_policy(model), PROMPT, budget=budget)
    assert f"{budget} tokens" in message
    assert "20" in message


@pytest.mark.parametrize("max_new_tokens", [0, -3])
def test_an_answer_of_no_tokens_is_refused(model, fails_in_one_line, max_new_tokens):
    message = fails_in_one_line(
        compressed_generate, model, draw_policy(model), PROMPT, budget=64, max_new_tokens=max_new_tokens
    )
    assert f"max_new_tokens is {max_new_tokens}" in message


@pytest.mark.parametrize("option", ["chunk_tokens", "evict_every_tokens"])
def test_an_interval_of_no_tokens_is_refused(model, fails_in_one_line, option):
    message = fails_in_one_line(compressed_generate, model, draw_policy(model), PROMPT, budget=64, **{option: 0})
    assert f"{option} is 0, expected at least 1" in message


@pytest.mark.parametrize("num_letters", [600, 440])
def test_a_prompt_and_answer_beyond_the_model_are_refused(model, fails_in_one_line, num_letters):
    message = fails_in_one_line(compressed_generate, model, draw_policy(model), "x" * num_letters, budget=64)
    assert "512" in message
