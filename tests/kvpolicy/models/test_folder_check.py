"""Folders with code: none of it is run, nothing asks for consent, and the digest covers everything that is read."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.folder_check import require_loadable_folder
from kvpolicy.models.model_folder import TEMPLATES, content_files, is_content
from kvpolicy.models.reference import resolve_model

LOAD = """
import sys
from pathlib import Path
from kvpolicy.errors import InputError
from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.reference import resolve_model
for folder in sys.argv[1:]:
    for use in (resolve_model, lambda folder: load_language_model(Path(folder), dtype="float32")):
        try:
            print(type(use(folder)).__name__)
        except InputError as error:
            print("InputError:", error)
"""
ARCHITECTURE = {
    "AutoConfig": "theirs.TheirConfig",
    "AutoModelForCausalLM": "theirs.TheirModel",
    "AutoTokenizer": [None, "theirs.TheirTokenizer"],
}


class Marks:
    """Unpickled, it makes a file."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return (Path.touch, (Path(self.marker),))


@pytest.fixture
def marker(tmp_path):
    """A file that the code of the model would make."""
    return tmp_path / "code was run"


@pytest.fixture
def folder(tiny_model_folder, tmp_path, marker):
    """A model with a file of Python beside it."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_model_folder("llama"), copy)
    lines = [
        "from pathlib import Path",
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast",
        f"Path({str(marker)!r}).touch()",
        "class TheirConfig(LlamaConfig): model_type = 'theirs'",
        "class TheirModel(LlamaForCausalLM): config_class = TheirConfig",
        "class TheirTokenizer(PreTrainedTokenizerFast): pass",
    ]
    (copy / "theirs.py").write_text("\n".join(lines))
    return copy


def change(path, **entries):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | entries))


def as_foreign_architecture(folder):
    change(folder / "config.json", auto_map=ARCHITECTURE, model_type="theirs", architectures=["TheirModel"])


def as_native_architecture(folder):
    change(folder / "config.json", auto_map=ARCHITECTURE)
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["theirs.TheirTokenizer", None]})


@pytest.mark.parametrize("answers", ['yes y | "$@"', '"$@" <&-'], ids=["yes", "closed"])
def test_no_code_is_run_whatever_standard_input_says(folder, marker, answers, tmp_path):
    native = tmp_path / "native"
    shutil.copytree(folder, native)
    as_foreign_architecture(folder)
    as_native_architecture(native)
    command = ["bash", "-c", answers, "bash", sys.executable, "-c", LOAD, str(folder), str(native)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    *refused, resolved, loaded = finished.stdout.strip().splitlines()
    assert (resolved, loaded) == ("ModelReference", "LanguageModel")
    assert len(refused) == 2
    for line in refused:
        assert line.startswith(f"InputError: model {folder}: config.json names code of its own (theirs.TheirConfig)")
        assert "never run" in line and "'theirs'" in line
    assert not marker.exists()


def test_an_architecture_of_transformers_is_computed_by_transformers_class(folder, tiny_model, draw_tokens, marker):
    as_native_architecture(folder)
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "theirs.py", folder / "custom_generate" / "generate.py")
    model = load_language_model(folder, dtype="float32")
    assert type(model.network).__module__ == "transformers.models.llama.modeling_llama"
    assert type(model.tokenizer).__module__.startswith("transformers.")
    tokens = draw_tokens(1, 20)
    with torch.inference_mode():
        torch.testing.assert_close(model.network(tokens).logits, tiny_model("llama").network(tokens).logits)
    assert not marker.exists()


def _index(folder, name):
    (folder / "model.safetensors").unlink()
    change(folder / "model.safetensors.index.json", metadata={}, weight_map={"lm_head.weight": name})


def _tokenizer(folder, auto_map):
    change(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="TheirTokenizer")


REFUSED = {
    "an architecture": (as_foreign_architecture, "names code of its own (theirs.TheirConfig)"),
    "code of a repository": (
        lambda folder: change(folder / "config.json", auto_map={"AutoModel": "a/b--x.Y"}, model_type="x"),
        "names code of its own (a/b--x.Y)",
    ),
    "a tokenizer": (
        lambda folder: _tokenizer(folder, {"AutoTokenizer": ["theirs.TheirTokenizer", None]}),
        "tokenizer_config.json names code of its own (theirs.TheirTokenizer)",
    ),
    "a tokenizer, as once written": (
        lambda folder: _tokenizer(folder, [None, "theirs.TheirTokenizer"]),
        "tokenizer_config.json names code of its own (theirs.TheirTokenizer)",
    ),
    "an adapter": (
        lambda folder: change(folder / "adapter_config.json", base_model_name_or_path="a/b"),
        "adapter_config.json",
    ),
    "attention of the hub": (
        lambda folder: change(folder / "config.json", _attn_implementation="a/kernel"),
        "kernel 'a/kernel' (attn_implementation)",
    ),
    "experts of the hub": (
        lambda folder: change(folder / "config.json", experts_implementation={"": "sonicmoe"}),
        "kernel 'sonicmoe' (experts_implementation)",
    ),
    "another configuration": (
        lambda folder: change(folder / "config.json", configuration_files=["config.4.0.0.json"]),
        "configuration_files",
    ),
    "weights elsewhere": (
        lambda folder: change(folder / "config.json", transformers_weights="inner/model.safetensors"),
        "config.json refers to 'inner/model.safetensors'",
    ),
    "a shard outside": (
        lambda folder: _index(folder, "../other/model.safetensors"),
        "model.safetensors.index.json refers to '../other/model.safetensors'",
    ),
    "a shard that is no content": (lambda folder: _index(folder, "model.pt"), "refers to 'model.pt'"),
    "a tokenizer elsewhere": (
        lambda folder: change(folder / "tokenizer_config.json", fast_tokenizer_files=["../tokenizer.4.0.json"]),
        "tokenizer_config.json refers to '../tokenizer.4.0.json'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_code_or_outside_the_digest_is_one_line(folder, fails_in_one_line, case, marker):
    make, said = REFUSED[case]
    make(folder)
    for use in (lambda: resolve_model(str(folder)), lambda: load_language_model(folder)):
        message = fails_in_one_line(use)
        assert message.startswith(f"model {folder}: ") and said in message
    assert not marker.exists()


def test_a_folder_as_transformers_saves_it_passes(tiny_model_folder, folder):
    for family in ("llama", "qwen3", "gemma"):
        require_loadable_folder(tiny_model_folder(family))
    change(folder / "config.json", auto_map=None, attn_implementation="flash_attention_2", _attn_implementation=None)
    change(folder / "tokenizer_config.json", auto_map={}, fast_tokenizer_files=["tokenizer.json"])
    require_loadable_folder(folder)


def test_pickled_weights_are_read_without_what_they_would_run(folder, marker, fails_in_one_line):
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert load_language_model(folder, dtype="float32").spec.num_layers == 3
    torch.save({**weights, "more": Marks(marker)}, folder / "pytorch_model.bin")
    assert str(folder) in fails_in_one_line(load_language_model, folder)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Marks(marker)))
    assert marker.exists()  # it would have been


def test_the_digest_covers_the_templates_that_a_folder_has_more_of(folder):
    before = resolve_model(str(folder)).digest
    (folder / TEMPLATES).mkdir()
    (folder / TEMPLATES / "default.jinja").write_text("one")
    assert load_language_model(folder).tokenizer.chat_template == "one"
    one = resolve_model(str(folder)).digest
    (folder / TEMPLATES / "default.jinja").write_text("two")
    assert len({before, one, resolve_model(str(folder)).digest}) == 3


def test_the_digest_leaves_code_out(folder):
    before = resolve_model(str(folder)).digest
    (folder / "theirs.py").write_text("raise SystemExit")
    assert resolve_model(str(folder)).digest == before
    assert "theirs.py" not in content_files(folder)


def test_every_file_that_a_tokenizer_of_transformers_reads_is_content():
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    read = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"}
    read |= {"chat_template.jinja", f"{TEMPLATES}/tool_use.jinja", "generation_config.json", "tekken.json"}
    read |= {"tokenizer.model.v3", "tiktoken.model", "qwen.tiktoken"}
    seen = 0
    for name in sorted({name for name in TOKENIZER_MAPPING_NAMES.values() if name}):
        files = getattr(getattr(transformers, name, None), "vocab_files_names", None)
        seen += bool(files)
        read |= {file for file in (files or {}).values() if isinstance(file, str)}
    assert seen > 30
    assert sorted(name for name in read if not is_content(name)) == []
    assert not any(is_content(name) for name in ("theirs.py", "sha256.json", "inner/model.safetensors", "README.md"))
