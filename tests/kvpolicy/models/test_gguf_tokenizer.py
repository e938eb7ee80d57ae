"""Tokenizers of GGUF files: text becomes the tokens that the header asks for, or the file is refused."""

import pytest
import transformers
from tokenizers import pre_tokenizers

from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.convert import convert_gguf
from tests.gguf_of_model import write_model_gguf
from tests.tiny_gguf import CHAT_TEMPLATE

pytestmark = pytest.mark.skipif(not hasattr(transformers, "GgufConfig"), reason="this transformers reads no GGUF files")

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACE, LINE = "Ġ", "Ċ"


@pytest.fixture(scope="module")
def network():
    """Makes a small random Llama with so many tokens."""

    def make(num_tokens):
        config = transformers.LlamaConfig(
            vocab_size=num_tokens,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
        return transformers.LlamaForCausalLM(config)

    return make


@pytest.fixture
def write(network, tmp_path):
    """Writes a file with fields of a tokenizer: `write(tokens, {"pre": "llama-bpe"})`; the last two are special."""

    def make(tokens, fields, kinds=None):
        named = {
            name if name == "tokenizer.chat_template" else f"tokenizer.ggml.{name}": fields[name] for name in fields
        }
        usual = {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds or [1] * (len(tokens) - 2) + [3, 3],
            "tokenizer.ggml.bos_token_id": len(tokens) - 2,
            "tokenizer.ggml.eos_token_id": len(tokens) - 1,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }
        return write_model_gguf(tmp_path / "model.gguf", network(len(tokens)), "llama", usual | named)

    return make


@pytest.fixture
def read(write, tmp_path):
    """The tokenizer that a run would use, after a conversion."""

    def make(tokens, fields, **more):
        convert_gguf(write(tokens, fields, **more), tmp_path / "converted")
        return load_language_model(tmp_path / "converted").tokenizer

    return make


def byte_level(*more):
    return [*LETTERS, "ab", *more, "<|im_start|>", "<|im_end|>"]


def tokens_of(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


def test_digits_are_split_before_blanks_are_gathered(read):
    """SmolLM's: what stands before a digit ends there, so two blanks are gathered that GPT-2 would keep apart."""
    merges = [f"{SPACE} {SPACE}", f"{LINE} {LINE}", "1 2", f"{SPACE} 1"]
    tokens = byte_level(SPACE * 2, LINE * 2, "12", f"{SPACE}1")
    smol = read(tokens, {"pre": "smollm", "merges": merges})
    assert tokens_of(smol, "a  12") == ["a", SPACE * 2, "1", "2"]
    assert tokens_of(smol, "\n\n1 12") == [LINE * 2, "1", SPACE, "1", "2"]


def test_gpt_2_gathers_digits(read):
    merges = [f"{SPACE} {SPACE}", "1 2", f"{SPACE} 1"]
    tokens = byte_level(SPACE * 2, "12", f"{SPACE}1")
    assert tokens_of(read(tokens, {"pre": "gpt-2", "merges": merges}), "a  12") == ["a", SPACE, SPACE, "12"]


def test_llama_3_takes_whole_tokens_and_begins_with_its_token(read):
    fields = {"pre": "llama-bpe", "merges": ["b c"]}
    tokens = byte_level("bc", "abc")
    assert tokens_of(read(tokens, fields), "abc 123") == ["<|im_start|>", "abc", SPACE, "1", "2", "3"]


def test_a_header_that_says_so_adds_no_beginning(read):
    fields = {"pre": "llama-bpe", "merges": ["b c"], "add_bos_token": False}
    assert tokens_of(read(byte_level("bc", "abc"), fields), "abc") == ["abc"]


def test_no_token_is_added_beyond_the_header(read):
    tokenizer = read(byte_level(), {})
    assert len(tokenizer) == len(byte_level())
    assert max(tokenizer("<|endoftext|>")["input_ids"]) < len(byte_level())


@pytest.mark.parametrize("has_blank", [True, False])
def test_a_blank_goes_before_a_text_where_the_header_says_so(read, has_blank):
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "y", "e", "s", "ye", "yes", "▁yes"]
    tokens = [*pieces, "<s>", "</s>"]
    fields = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "scores": [0.0] * 257 + [-1.0, -2.0, -3.0, -4.0, -0.3, -0.2, -0.1, 0.0, 0.0],
        "unknown_token_id": 0,
        "add_space_prefix": has_blank,
        "add_bos_token": False,
    }
    kinds = [2] + [6] * 256 + [1] * 7 + [3, 3]
    tokenizer = read(tokens, fields, kinds=kinds)
    assert tokens_of(tokenizer, "yes") == (["▁yes"] if has_blank else ["yes"])
    assert tokens_of(tokenizer, "yes yes") == (["▁yes", "▁yes"] if has_blank else ["yes", "▁yes"])
    assert tokenizer.decode(tokenizer("yes yes")["input_ids"]) == "yes yes"


def test_whatever_ends_a_turn_ends_an_answer(write, tmp_path):
    convert_gguf(write(byte_level("<|eot|>"), {"eot_token_id": 257}, [1] * 257 + [3] * 3), tmp_path / "model")
    assert load_language_model(tmp_path / "model").network.generation_config.eos_token_id == [259, 257]


REFUSED = {
    "an unknown split": ({"pre": "mystery"}, "splits text by 'mystery'"),
    "no split": ({"pre": None}, "splits text by None"),
    "another kind": ({"model": "t5"}, "of kind 't5'"),
    "blanks that vanish": ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces"),
    "characters that change": ({"precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap"),
    "a special token that is none": ({"eos_token_id": 999}, "eos_token_id = 999 of 259 tokens"),
    "no merges": ({"merges": None}, "no tokenizer.ggml.merges"),
    "an end that is a text": ({"eot_token_id": "x"}, "tokenizer.ggml.eot_token_id that is not a whole number"),
    "one merge": ({"merges": "a b"}, "tokenizer.ggml.merges that is not a list of texts"),
    "merges that are numbers": ({"merges": [1, 2]}, "tokenizer.ggml.merges that is not a list of texts"),
    "kinds that are texts": ({"token_type": ["x"]}, "tokenizer.ggml.token_type that is not a list of whole numbers"),
    "kinds of some tokens": ({"token_type": [1, 1]}, "2 tokenizer.ggml.token_type of 259 tokens"),
    "a beginning that is a text": ({"add_bos_token": "no"}, "tokenizer.ggml.add_bos_token that is not true or false"),
    "a template that is a number": ({"tokenizer.chat_template": 3}, "tokenizer.chat_template that is not a text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_header_that_asks_for_more_is_refused(write, tmp_path, fails_in_one_line, case):
    fields, said = REFUSED[case]
    gguf = write(byte_level(), fields)
    message = fails_in_one_line(convert_gguf, gguf, tmp_path / "model")
    assert str(gguf) in message and said in message


def test_a_special_token_that_would_be_cut_is_refused(write, tmp_path, fails_in_one_line):
    """Full-width bars are no letters of a byte-level vocabulary: transformers spells the token in bytes."""
    tokens = [*LETTERS, "ab", "<|im_start|>", "<｜end▁of▁turn｜>"]
    gguf = write(tokens, {"tokenizer.chat_template": CHAT_TEMPLATE})
    message = fails_in_one_line(convert_gguf, gguf, tmp_path / "model")
    assert "its token 258 ('<｜end▁of▁turn｜>') would be read as others" in message
