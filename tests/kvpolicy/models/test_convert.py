"""GGUF files become models that compute the same as what they were made of, or are refused with what is in the way."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import transformers

from kvpolicy.digests import digest_file
from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.convert import convert_gguf, converted_place
from kvpolicy.models.gguf_file import GgufFile, read_gguf
from kvpolicy.models.reference import resolve_model
from tests.gguf_of_model import write_model_gguf

pytestmark = pytest.mark.skipif(not hasattr(transformers, "GgufConfig"), reason="this transformers reads no GGUF files")

VOCABULARY, HEAD_DIM, POSITIONS, THETA = 259, 16, 256, 500.0
RMS, ROTATED = "attention.layer_norm_rms_epsilon", "rope.dimension_count"
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": None,
}


def rope(kind="default", **entries):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": THETA, **entries}}


@pytest.fixture(scope="module")
def network():
    """Makes small random models with weights that bfloat16 can hold: `network("Llama", num_hidden_layers=1)`."""

    def make(name, **entries):
        config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(
            **(SHAPE | rope() | entries)
        )
        config._attn_implementation = "eager"
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = getattr(transformers, f"{name}ForCausalLM")(config)
            for parameter in made.parameters():
                if parameter.dim() == 1:
                    parameter.data += 0.2 * torch.randn_like(parameter)
                parameter.data = parameter.data.bfloat16().float()
        return made.eval()

    return make


@pytest.fixture
def write(tmp_path):
    """Writes a network as a GGUF file: `write(network, "llama", {"rope.freq_base": 1e4})`, with fields of Llama's."""

    def make(made, architecture, fields=None, **more):
        usual = {"rope.freq_base": THETA, RMS: getattr(made.config, "rms_norm_eps", None)}
        named = {f"{architecture}.{name}": value for name, value in (usual | (fields or {})).items()}
        return write_model_gguf(tmp_path / "model.gguf", made, architecture, named | more.pop("others", {}), **more)

    return make


@pytest.fixture
def converted(tmp_path):
    """Converts a file and loads what it became with transformers alone, in float32."""

    def convert(gguf):
        folder = tmp_path / "converted"
        convert_gguf(gguf, folder)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
        ).eval()

    return convert


def logits(network, num_tokens=120):
    tokens = torch.randint(0, 256, (1, num_tokens), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return network(tokens).logits


def assert_computes_the_same(made, oracle, *, unlike=None):
    """Equal within rounding; and the model without what is tested is not, so that the test could fail."""
    torch.testing.assert_close(logits(made), logits(oracle), rtol=1e-4, atol=1e-4)
    if unlike is not None:
        assert (logits(unlike) - logits(oracle)).abs().max() > 1e-2


def llama3_divisors(factor, original, theta=THETA):
    """As llama.cpp's converter writes them for Llama 3.1."""
    divisors = []
    for pair in range(HEAD_DIM // 2):
        wave = 2 * math.pi * theta ** (2 * pair / HEAD_DIM)
        if wave < original / 4:
            divisors.append(1.0)
        elif wave > original:
            divisors.append(factor)
        else:
            share = (original / wave - 1) / 3
            divisors.append(1 / ((1 - share) / factor + share))
    return np.array(divisors, dtype=np.float32)


def with_frequencies(made, divisors, attention=1.0, theta=THETA):
    """The same model with its frequencies divided, by the formula."""
    frequencies = 1 / theta ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM) / np.asarray(divisors)
    made.model.rotary_emb.inv_freq = torch.tensor(frequencies, dtype=torch.float32)
    made.model.rotary_emb.attention_scaling = attention
    return made


# Architecture: class, entries of its configuration, fields of the header, further tensors.
MODELS = {
    "llama": ("llama", "Llama", {}, {ROTATED: HEAD_DIM}, {}),
    "llama, tied": ("llama", "Llama", {"tie_word_embeddings": True}, {ROTATED: HEAD_DIM, "expert_count": 0}, {}),
    "llama, wide heads": (
        "llama",
        "Llama",
        {"head_dim": 32},
        {"attention.key_length": 32, "attention.value_length": 32, ROTATED: 32},
        {},
    ),
    "linear": (
        "llama",
        "Llama",
        rope("linear", factor=4.0),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
    ),
    "linear, as once written": ("llama", "Llama", rope("linear", factor=4.0), {"rope.scale_linear": 4.0}, {}),
    "no scaling": ("llama", "Llama", {}, {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "llama 3": (
        "llama",
        "Llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        {"rope.scaling.original_context_length": 64},
        {"rope_freqs.weight": llama3_divisors(8.0, 64)},
    ),
    "qwen2": ("qwen2", "Qwen2", {}, {}, {}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32}, {"attention.key_length": 32, "attention.value_length": 32}, {}),
    "phi3": (
        "phi3",
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "sliding_window": 50,
            **rope(
                "longrope",
                short_factor=[1.0, 1.5, 2.0, 2.5],
                long_factor=[1.0, 3.0, 5.0, 9.0],
                original_max_position_embeddings=64,
                attention_factor=1.25,
                partial_rotary_factor=0.5,
                factor=4.0,
            ),
        },
        {
            ROTATED: HEAD_DIM // 2,
            "attention.sliding_window": 50,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.25,
        },
        {
            "rope_factors_short.weight": np.array([1.0, 1.5, 2.0, 2.5]),
            "rope_factors_long.weight": np.array([1.0, 3.0, 5.0, 9.0]),
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 50,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": THETA},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 50,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        {},
    ),
    "stablelm": (
        "stablelm",
        "StableLm",
        {"use_qkv_bias": True, "layer_norm_eps": 1e-3, **rope(partial_rotary_factor=0.5)},
        {"attention.layer_norm_epsilon": 1e-3, RMS: None, ROTATED: HEAD_DIM // 2, "use_parallel_residual": False},
        {},
    ),
    "starcoder2": (
        "starcoder2",
        "Starcoder2",
        {"norm_epsilon": 1e-3, "use_bias": True},
        {"attention.layer_norm_epsilon": 1e-3, RMS: None},
        {},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_it_was_made_of_computed(network, write, converted, name):
    architecture, made, entries, fields, tensors = MODELS[name]
    oracle = network(made, **entries)
    epsilon = {} if hasattr(oracle.config, "rms_norm_eps") else {RMS: None}
    model = converted(write(oracle, architecture, fields | epsilon, tensors=tensors))
    assert_computes_the_same(model, oracle)


def test_divisors_of_any_kind_divide_frequencies(network, write, converted):
    divisors = np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)
    plain = network("Llama")
    model = converted(write(plain, "llama", tensors={"rope_freqs.weight": divisors}))
    assert_computes_the_same(model, with_frequencies(network("Llama"), divisors), unlike=plain)


def test_llama_3_1_is_known_by_its_divisors_alone(network, write, converted):
    theta = 500_000.0
    divisors = llama3_divisors(8.0, 8192, theta)
    gguf = write(network("Llama"), "llama", {"rope.freq_base": theta}, tensors={"rope_freqs.weight": divisors})
    model = converted(gguf)
    rule = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    expected = {"rope_type": "llama3", "rope_theta": theta, "factor": 8.0, **rule}
    assert model.config.rope_parameters == expected
    oracle = with_frequencies(network("Llama"), divisors, theta=theta)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, oracle.model.rotary_emb.inv_freq)


def test_yarn_is_what_ggml_computes(network, write, converted):
    """By the formula of ggml's `rope_yarn`, with the factors that llama.cpp gives it."""
    factor, original, fast, slow = 4.0, 64, 16.0, 2.0
    dims = [HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (fast, slow)]
    low, high = max(0, math.floor(dims[0])), min(HEAD_DIM - 1, math.ceil(dims[1]))
    pairs = np.arange(HEAD_DIM // 2)
    mix = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    divisors = 1 / ((1 - mix) / factor + mix)
    fields = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.yarn_beta_fast": fast,
        "rope.scaling.yarn_beta_slow": slow,
        "rope.scaling.finetuned": True,
    }
    plain = network("Qwen2")
    oracle = with_frequencies(network("Qwen2"), divisors, attention=1 + 0.1 * math.log(factor))
    assert_computes_the_same(converted(write(plain, "qwen2", fields)), oracle, unlike=plain)


HOLES = ["blk.0.ffn_up.weight", "blk.1.attn_k.weight", "output_norm.weight", "token_embd.weight"]


@pytest.mark.parametrize("missing", HOLES)
def test_a_file_with_a_hole_in_it_is_refused(network, write, tmp_path, fails_in_one_line, missing):
    gguf = write(network("Llama"), "llama", without=[missing])
    message = fails_in_one_line(convert_gguf, gguf, tmp_path / "out" / "model")
    assert str(gguf) in message and missing in message
    assert list((tmp_path / "out").iterdir()) == []


def test_a_hole_is_found_before_any_weight_is_read(network, write, tmp_path, monkeypatch, fails_in_one_line):
    gguf = write(network("Llama"), "llama", without=["output_norm.weight"])

    def refuse(file, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(GgufFile, "values", refuse)
    assert "output_norm.weight" in fails_in_one_line(convert_gguf, gguf, tmp_path / "model")


def test_tensors_that_nothing_uses_and_other_shapes_are_refused(network, write, tmp_path, fails_in_one_line):
    def refusal(**more):
        return fails_in_one_line(convert_gguf, write(network("Llama"), "llama", **more), tmp_path / "model")

    bias = {"blk.0.attn_q.bias": np.zeros(64)}
    assert "have no place in the model (blk.0.attn_q.bias)" in refusal(tensors=bias)
    narrow = {"blk.0.ffn_up.weight": np.zeros((95, 64))}
    assert "tensor blk.0.ffn_up.weight has shape (95, 64)" in refusal(tensors=narrow)
    assert "rope_freqs.weight must hold 8 divisors" in refusal(tensors={"rope_freqs.weight": np.ones(7)})
    assert "rope_freqs.weight must hold 8 divisors" in refusal(tensors={"rope_freqs.weight": np.zeros(8)})
    assert "LongRoPE needs" in refusal(tensors={"rope_factors_long.weight": np.ones(8)})


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
REFUSED = {
    "a scale of attention": ({"attention.scale": 0.5}, "llama.attention.scale = 0.5, which would be dropped"),
    "a scale of logits": ({"logit_scale": 2.0}, "llama.logit_scale"),
    "a cap": ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
    "experts": ({"expert_count": 8}, "llama.expert_count = 8"),
    "a window": ({"attention.sliding_window": 64}, "llama.attention.sliding_window = 64"),
    "both directions": ({"attention.causal": False}, "not causal"),
    "values of another size": ({"attention.value_length": 8}, "its values 8"),
    "half of a head rotated": ({ROTATED: 8}, "rotates 8 of 16"),
    "layers of their own": ({"attention.head_count_kv": [2, 4]}, "llama.attention.head_count_kv layer by layer"),
    "an unknown scaling": ({"rope.scaling.type": "ntk"}, "'ntk'"),
    "a factor of attention": ({"rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor"),
    "LongRoPE without divisors": ({"rope.scaling.type": "longrope"}, "LongRoPE needs"),
    "YaRN of another kind": (
        YARN | {"rope.scaling.yarn_log_multiplier": 0.1},
        "llama.rope.scaling.yarn_log_multiplier",
    ),
    "YaRN by halves": (YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor = 0.5"),
    "another number of tokens": ({"vocab_size": 300}, "another number of tokens"),
    "no norm": ({RMS: None}, "its header has no llama.attention.layer_norm_rms_epsilon"),
    "what nobody knows": ({"new_feature": "on"}, "llama.new_feature = on"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_header_that_asks_for_more_is_refused(network, write, tmp_path, fails_in_one_line, case):
    fields, said = REFUSED[case]
    gguf = write(network("Llama"), "llama", fields)
    message = fails_in_one_line(convert_gguf, gguf, tmp_path / "model")
    assert message.startswith(f"GGUF file {gguf} cannot be converted: ") and said in message


def test_what_is_scaled_twice_or_cannot_be_scaled_is_refused(network, write, tmp_path, fails_in_one_line):
    divisors = {"rope_freqs.weight": llama3_divisors(8.0, 64)}
    twice = write(network("Llama"), "llama", {"rope.scaling.factor": 4.0}, tensors=divisors)
    assert "scaled twice" in fails_in_one_line(convert_gguf, twice, tmp_path / "model")
    entries = {"original_max_position_embeddings": POSITIONS}
    linear = write(network("Phi3", **entries), "phi3", {"rope.scaling.factor": 4.0})
    assert "linear" in fails_in_one_line(convert_gguf, linear, tmp_path / "model")


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"general.type": "adapter"}, "of type 'adapter'"),
        ({"split.count": 2}, "one of several parts"),
    ],
)
def test_what_is_no_whole_model_is_refused(network, write, tmp_path, fails_in_one_line, others, said):
    gguf = write(network("Llama"), "llama", others=others)
    assert said in fails_in_one_line(convert_gguf, gguf, tmp_path / "model")


def test_an_architecture_that_is_not_translated_is_refused(network, write, tmp_path, fails_in_one_line):
    gguf = write(network("Llama"), "qwen3moe")
    assert "architecture 'qwen3moe' is not one of those" in fails_in_one_line(convert_gguf, gguf, tmp_path / "model")


def test_two_conversions_are_one_model_whatever_lies_beside_the_file(network, write, tmp_path):
    gguf = write(network("Llama"), "llama")
    first = resolve_model(str(gguf), cache=tmp_path / "one")
    (tmp_path / "other").mkdir()
    moved = shutil.copy(gguf, tmp_path / "other" / "renamed.gguf")
    (tmp_path / "other" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "ab", "tokenizer_class": "x"}))
    (tmp_path / "other" / "chat_template.jinja").write_text("another")
    (tmp_path / "other" / "config.json").write_text("{")
    second = resolve_model(str(moved), cache=tmp_path / "two")
    assert second.digest == first.digest and second.folder != first.folder
    assert load_language_model(first.folder, dtype="float32").spec.num_layers == 2


def test_what_an_earlier_conversion_made_is_not_used(network, write, tmp_path):
    gguf = write(network("Llama"), "llama")
    place = converted_place("model", digest_file(gguf), tmp_path)
    earlier = place.with_name(place.name.rpartition("-")[0])
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_text("{}")
    found = resolve_model(str(gguf), cache=tmp_path)
    assert found.folder == place != earlier
    assert read_gguf(gguf).architecture == "llama"
