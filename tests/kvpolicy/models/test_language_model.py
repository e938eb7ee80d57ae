"""Loading: every supported family's shape, and one line for every model that is not supported or not whole."""

import json
import shutil

import pytest
import torch
import transformers

from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.language_model import read_spec

SHAPES = {
    "llama": (3, 4, 2, 16),
    "llama_mha": (3, 4, 4, 16),
    "qwen2": (3, 4, 2, 16),
    "qwen3": (3, 4, 2, 16),
    "phi3": (3, 4, 2, 16),
    "mistral": (3, 4, 2, 16),
    "gemma": (3, 4, 1, 16),
}


@pytest.mark.parametrize("family", SHAPES)
def test_the_shape_of_every_family(tiny_model, family):
    model = tiny_model(family)
    spec = model.spec
    assert (spec.num_layers, spec.num_query_heads, spec.num_kv_heads, spec.head_dim) == SHAPES[family]
    assert spec.max_positions == 512
    assert not model.network.training
    assert not any(parameter.requires_grad for parameter in model.network.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_wanted_type(tiny_model_folder, dtype):
    model = load_language_model(tiny_model_folder("llama"), dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.network.parameters()} == {model.dtype}


def test_an_unknown_type_is_one_line(tiny_model_folder, fails_in_one_line):
    message = fails_in_one_line(load_language_model, tiny_model_folder("llama"), dtype="int8")
    assert "'int8'" in message and "bfloat16" in message


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 300,
}
UNSUPPORTED = {
    "no-rope": (transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=300), "no rotary positions"),
    "encoder-decoder": (transformers.T5Config(d_model=32, d_ff=32, num_layers=2, num_heads=2, d_kv=16), "decoder"),
    "no-attention": (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=300), "decoder"),
    "hybrid": (transformers.Lfm2Config(**SMALL, num_key_value_heads=1, full_attn_idxs=[1]), "has layers of conv"),
    "chunked": (transformers.Llama4TextConfig(**SMALL, num_key_value_heads=1, head_dim=16), "has layers of chunked"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_architectures_are_one_line(tmp_path, tiny_model_folder, fails_in_one_line, name):
    config, reason = UNSUPPORTED[name]
    config.save_pretrained(tmp_path)
    for path in tiny_model_folder("llama").glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    message = fails_in_one_line(load_language_model, tmp_path)
    assert str(tmp_path) in message and reason in message
    assert reason in fails_in_one_line(read_spec, config)


@pytest.fixture
def copied(tiny_model_folder, tmp_path):
    shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    return tmp_path / "model"


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1_000])


def _remove_tokenizer(folder):
    for path in [*folder.glob("tokenizer*"), *folder.glob("special_tokens*"), *folder.glob("*.jinja")]:
        path.unlink()


DAMAGE = {
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
    "gone": shutil.rmtree,
    "no config": lambda folder: (folder / "config.json").unlink(),
    "cut config": lambda folder: (folder / "config.json").write_text("{"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "cut weights": lambda folder: _cut(folder / "model.safetensors"),
    "no tokenizer": _remove_tokenizer,
    "cut tokenizer": lambda folder: _cut(folder / "tokenizer.json"),
    "unknown architecture": lambda folder: (folder / "config.json").write_text('{"model_type": "never-heard-of"}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_is_no_whole_model_is_one_line(copied, fails_in_one_line, damage):
    DAMAGE[damage](copied)
    message = fails_in_one_line(load_language_model, copied)
    assert str(copied) in message
    assert ("is not a JSON object" if damage == "cut config" else "cannot be loaded") in message


@pytest.mark.parametrize("missing", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_weights_that_are_not_in_the_file_are_not_made_up(copied, fails_in_one_line, missing):
    # transformers would draw them at random and say so in a log.
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    del weights[missing]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    message = fails_in_one_line(load_language_model, copied)
    assert missing in message


def test_a_weight_of_another_shape_is_named(copied, fails_in_one_line):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 8}))
    message = fails_in_one_line(load_language_model, copied)
    assert "weight model.layers.0.mlp.down_proj.weight has shape" in message


def test_query_heads_that_do_not_divide_are_one_line(copied, fails_in_one_line):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    message = fails_in_one_line(load_language_model, copied)
    assert "4 query heads" in message and "3 KV heads" in message


def test_a_token_without_an_embedding_and_layers_without_a_place_are_one_line(copied, fails_in_one_line):
    model = load_language_model(copied)
    message = fails_in_one_line(model.logits, torch.tensor([[9999]]), torch.zeros(1, 1, dtype=torch.long), 1)
    assert "token 9999 has no embedding" in message
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": None}))
    assert "weights of layers that config.json does not have" in fails_in_one_line(load_language_model, copied)
