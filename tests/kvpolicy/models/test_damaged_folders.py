"""Model folders that are damaged or make no sense: one line when the model is found, before anything is loaded."""

import json
import os
import shutil

import pytest

from kvpolicy.errors import first_line
from kvpolicy.models.reference import find_model, resolve_model

DEEP = "[" * 200_000


@pytest.fixture
def folder(tiny_model_folder, tmp_path):
    return shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")


def _change(folder, name, **entries):
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | entries))


def _replace(folder, name, make):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)


NO_OBJECT = "is not a JSON object"
NO_FILE = "model.safetensors is not a file"
DAMAGED = {
    "empty": (lambda folder: (folder / "config.json").write_text(""), f"config.json {NO_OBJECT}"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), f"config.json {NO_OBJECT}"),
    "deep": (lambda folder: (folder / "config.json").write_text(DEEP), f"config.json {NO_OBJECT}"),
    "two bytes a sign": (
        lambda folder: (folder / "config.json").write_text("{}", encoding="utf-16"),
        f"config.json {NO_OBJECT}",
    ),
    "a tokenizer that is null": (
        lambda folder: (folder / "tokenizer_config.json").write_text("null"),
        f"tokenizer_config.json {NO_OBJECT}",
    ),
    "an index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(DEEP),
        f"model.safetensors.index.json {NO_OBJECT}",
    ),
    "an index that is a folder": (
        lambda folder: (folder / "model.safetensors.index.json").mkdir(),
        "model.safetensors.index.json cannot be read (Is a directory)",
    ),
    "a record": (lambda folder: (folder / "sha256.json").write_text(DEEP), "does not match its recorded SHA-256"),
    "a record that is a folder": (lambda folder: (folder / "sha256.json").mkdir(), "Is a directory"),
    "a pipe": (lambda folder: _replace(folder, "model.safetensors", os.mkfifo), NO_FILE),
    "a link to nowhere": (
        lambda folder: _replace(folder, "model.safetensors", lambda path: path.symlink_to("none")),
        NO_FILE,
    ),
    "a link to itself": (
        lambda folder: _replace(folder, "model.safetensors", lambda path: path.symlink_to(path)),
        NO_FILE,
    ),
    "an architecture that is a list": (
        lambda folder: _change(folder, "config.json", auto_map={"AutoConfig": "a.B"}, model_type=["llama"]),
        "no architecture ['llama']",
    ),
    "a number of tokenizer files": (
        lambda folder: _change(folder, "tokenizer_config.json", fast_tokenizer_files=3),
        "tokenizer_config.json refers to 3",
    ),
    "an unknown quantization": (
        lambda folder: _change(folder, "config.json", quantization_config={"quant_method": "new"}),
        "quantized by 'new'",
    ),
    **{
        f"an end that is {end!r}": (
            lambda folder, end=end: _change(folder, "generation_config.json", eos_token_id=end),
            f"generation_config.json has eos_token_id {end!r}",
        )
        for end in ("x", 1.5, [[1]], {"a": 1})
    },
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_is_damaged_is_one_line(folder, fails_in_one_line, case):
    make, message = DAMAGED[case]
    make(folder)
    for find in (resolve_model, find_model):
        assert message in fails_in_one_line(find, str(folder))


def test_ends_of_every_form_pass(folder):
    for ends in (None, 3, [3, 4]):
        _change(folder, "generation_config.json", eos_token_id=ends)
        resolve_model(str(folder))


@pytest.mark.parametrize("source", ["x" * 300, f"/{'x' * 300}.gguf", f"{'x' * 300}/model", "~no-such-user/model"])
def test_a_path_that_cannot_be_asked_is_one_line(fails_in_one_line, tmp_path, source):
    for find in (resolve_model, find_model):
        assert len(fails_in_one_line(find, source, cache=tmp_path)) < 400


def test_the_first_line_of_an_error_is_more_than_an_announcement():
    assert first_line(ValueError("field 'a':\n    expected int\n    more")) == "field 'a': expected int"
    assert first_line(ValueError("field 'a'\nmore")) == "field 'a'"
    assert first_line(ValueError("")) == "ValueError"
