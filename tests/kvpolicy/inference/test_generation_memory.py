"""Memory of caches while an answer is decoded, counted over every tensor that is alive, whoever holds it."""

import dataclasses
import gc

import pytest
import torch

from kvpolicy.inference import generation
from kvpolicy.inference.generation import compressed_generate
from kvpolicy.inference.loading import load_model
from kvpolicy.text.encoded_sample import encode_message
from tests.drawn_policy import draw_policy

TEXT = "What is kept of a text is decided by what later words will want to know of it, and not by how it sounds. "
NUM_NEW = 8


def _living_bytes():
    """Of all tensors that the garbage collector knows, each storage once."""
    gc.collect()
    storages = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture
def bytes_while_decoding(monkeypatch):
    """Answers, and returns what is alive at the first and at the last token beyond what was before."""

    def run(model, policy, prompts, **options):
        seen = []
        decode = generation.decode_greedily

        def watched(model, cache, *args, **kwargs):
            seen.append(_living_bytes() - before)
            answers = decode(model, cache, *args, **kwargs)
            seen.append(_living_bytes() - before)
            return answers

        before = _living_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(generation, "decode_greedily", watched)
            answers = compressed_generate(model, policy, prompts, max_new_tokens=NUM_NEW, **options)
        return answers, seen

    return run


def _entry_bytes(model):
    """A key and a value in every head, and the position of the entry."""
    itemsize = torch.finfo(model.dtype).bits // 8
    return model.spec.num_heads * (2 * model.spec.head_dim * itemsize + 8)


def _check(model, bytes_while_decoding, prompts, budget, slack_bytes):
    policy, found = draw_policy(model), []
    for kept in (None, budget):
        answers, seen = bytes_while_decoding(model, policy, prompts, budget=kept)
        found.append(answers)
        slots = len(prompts) * (max(answer.num_kept_tokens for answer in answers) + NUM_NEW)
        for alive in seen:
            assert abs(alive - slots * _entry_bytes(model)) < slack_bytes
    for more, less in zip(*found, strict=True):
        assert more.num_kept_tokens == more.num_prompt_tokens
        assert more.cache_bytes / less.cache_bytes == more.num_prompt_tokens / budget


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_what_is_evicted_is_no_longer_in_memory(tiny_model, bytes_while_decoding, num_prompts):
    model = dataclasses.replace(tiny_model("llama"), digest="0" * 64)
    prompts = [TEXT * repeats for repeats in (3, 1, 2)[:num_prompts]]
    _check(model, bytes_while_decoding, prompts, budget=24, slack_bytes=20_000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_six_thousand_tokens_of_the_embedded_model_take_the_memory_of_the_budget(
    embedded_model_folder, bytes_while_decoding
):
    model = load_model(str(embedded_model_folder))
    per_text = len(encode_message(TEXT * 2, model.tokenizer)) - len(encode_message(TEXT, model.tokenizer))
    prompt = TEXT * (6 * 1024 // per_text)
    assert 6000 < len(encode_message(prompt, model.tokenizer)) < 6200
    _check(model, bytes_while_decoding, [prompt], budget=512, slack_bytes=2 * 2**20)
