"""Text of single tokens: together it is the text of all, and each letter is in one piece."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvpolicy.text.token_text import token_pieces
from tests.kvpolicy.tiny_tokenizers import KINDS, tiny_tokenizer


@pytest.fixture(scope="module")
def embedded_tokenizer(embedded_model_folder):
    return AutoTokenizer.from_pretrained(embedded_model_folder)


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=60)
def test_pieces_of_bytes_add_up_to_the_text(tiny_model, text):
    tokenizer = tiny_model("llama").tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_pieces(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=60)
def test_pieces_add_up_to_the_text(embedded_tokenizer, text):
    ids = embedded_tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_pieces(ids, embedded_tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == embedded_tokenizer.decode(ids)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("text", ["the lamp\n yes\n\nno ", "\n the  red\n", "the end"])
def test_pieces_of_every_kind_of_tokenizer_keep_white_space(kind, text):
    tokenizer = tiny_tokenizer(kind)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_pieces(ids, tokenizer)
    assert len(pieces) == len(ids)
    assert "".join(pieces) in (text, f" {text}")  # with the blank that some tokenizers write before every text


def test_a_letter_of_several_tokens_belongs_to_the_last(tiny_model):
    tokenizer = tiny_model("llama").tokenizer
    assert token_pieces(tokenizer("aü€", add_special_tokens=False)["input_ids"], tokenizer) == [
        "a", "", "ü", "", "", "€",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["byte level", "bpe, metaspace first", "unigram, prepending normalizer"])
@pytest.mark.parametrize("text", ["\ufffd", "a\ufffd\ufffdé€\ufffd\ufffd👩\ufffd", "\ufffd" * 3000])
def test_replacement_characters_in_a_text_are_pieces_soon(kind, text):
    tokenizer = tiny_tokenizer(kind)
    start = time.perf_counter()
    pieces = token_pieces(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer)
    assert time.perf_counter() - start < 3  # a tenth of a second on an idle machine
    assert "".join(pieces).removeprefix(" ") == text
    assert all(len(piece) <= 1 for piece in pieces)


def test_blanks_and_special_tokens_are_seen(embedded_tokenizer):
    ids = embedded_tokenizer("<|im_start|>user\nThe lamp is red.", add_special_tokens=False)["input_ids"]
    pieces = token_pieces(ids, embedded_tokenizer)
    assert pieces[0] == "<|im_start|>"
    assert " lamp" in pieces


def test_of_no_tokens_there_is_no_text(embedded_tokenizer):
    assert token_pieces([], embedded_tokenizer) == []
