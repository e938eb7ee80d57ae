"""Sources of models: how they are written, what they show, and which GGUF files are not whole yet."""

import os
import shutil
import time
from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.models.gguf_file import missing_content
from kvpolicy.models.model_sources import Candidate, ModelSource
from kvpolicy.models.reference import resolve_model


@pytest.fixture
def models(tiny_model_folder, tiny_gguf, tmp_path) -> Path:
    """A folder with a model folder, a GGUF file, one in a folder, and what is neither."""
    folder = tmp_path / "models"
    shutil.copytree(tiny_model_folder("llama"), folder / "llama")
    shutil.copy(tiny_gguf, folder / "tiny.gguf")
    (folder / "owner").mkdir()
    shutil.copy(tiny_gguf, folder / "owner" / "inner.gguf")
    (folder / ".hidden").mkdir()
    shutil.copy(tiny_gguf, folder / ".hidden" / "cached.gguf")
    shutil.copy(tiny_gguf, folder / ".tiny.gguf.part")
    shutil.copy(tiny_gguf, folder / ".copied.gguf")
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "text",
    [
        *("", "folder", "folder:", "models", "./models", "s3://bucket/models"),
        *("hub:", "hub:name", "hub:a/b/c", "hub:/a"),
        *("mlflow:", "mlflow:models:/name/1", "mlflow:name/1", "mlflow:@alias", "mlflow:name@"),
    ],
)
def test_a_source_of_another_form_is_one_line_that_names_it(text):
    with pytest.raises(InputError, match="source ") as refused:
        ModelSource.parse(text)
    assert repr(text) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_source_is_written_as_it_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(ModelSource.parse("folder:models")) == f"folder:{tmp_path}/models"
    for text in (f"folder:{tmp_path}", "hub:owner/name", "hub:owner/name@main", "mlflow:a name", "mlflow:name@alias"):
        assert str(ModelSource.parse(text)) == text


def test_a_folder_shows_its_models_and_those_one_folder_below(models):
    found = ModelSource.parse(f"folder:{models}").candidates()
    assert {Path(candidate.reference).relative_to(models).as_posix() for candidate in found} == {
        "llama",
        "tiny.gguf",
        "owner/inner.gguf",
    }
    (alone,) = ModelSource.parse(f"folder:{models / 'llama'}").candidates()
    assert alone.reference == str(models / "llama")
    assert alone.digest() == resolve_model(alone.reference).digest


def test_equal_files_have_one_digest_and_states_of_their_own(models):
    found = {Path(entry.reference).name: entry for entry in ModelSource.parse(f"folder:{models}").candidates()}
    tiny, inner = found["tiny.gguf"], found["inner.gguf"]
    assert tiny.digest() == inner.digest() != found["llama"].digest()
    assert tiny.state != inner.state
    assert tiny.present_state() == tiny.state
    with (models / "tiny.gguf").open("ab") as stream:
        stream.write(b"more")
    assert tiny.present_state() not in ("", tiny.state)
    (models / "tiny.gguf").unlink()
    assert tiny.present_state() == ""


def test_a_missing_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for name in ("gone", "file"):
        with pytest.raises(InputError, match=rf"source folder:\S+/{name} cannot be looked at"):
            ModelSource.parse(f"folder:{tmp_path / name}").candidates()


def test_a_gguf_file_is_whole_only_with_its_last_byte(tiny_gguf, tmp_path):
    content, part = tiny_gguf.read_bytes(), tmp_path / "part.gguf"
    assert missing_content(tiny_gguf) == ""
    lengths = {0, 1, 3, 4, 8, 20, 24, 100, *range(200, len(content), len(content) // 40), len(content) - 200}
    for length in sorted(lengths):
        part.write_bytes(content[:length])
        assert missing_content(part) != "", length
    part.write_bytes(b"something else" * 100)
    assert missing_content(part) == ""  # it will never be a GGUF file: what it is, the reader says


def test_a_gguf_header_that_is_wrong_is_told_from_a_file_that_is_short(tiny_gguf, tmp_path, fails_in_one_line):
    content, damaged = bytearray(tiny_gguf.read_bytes()), tmp_path / "damaged.gguf"
    first_key = 4 + 4 + 8 + 8  # after magic, version and two counts: length of the key, the key, type of its value
    first_type = first_key + 8 + int.from_bytes(content[first_key : first_key + 8], "little")
    for place, wrong in ((4, b"\x63"), (first_type, b"\xff"), (first_key + 8, b"\xff\xfe")):
        changed = content.copy()
        changed[place : place + len(wrong)] = wrong
        for length in (len(changed), len(changed) // 2):
            damaged.write_bytes(changed[:length])
            assert str(damaged) in fails_in_one_line(missing_content, damaged)


def test_a_gguf_file_that_is_not_whole_is_waited_for_a_day(tiny_gguf, tmp_path, fails_in_one_line):
    part = tmp_path / "part.gguf"
    part.write_bytes(tiny_gguf.read_bytes()[:3_000])
    candidate = Candidate(source=f"folder:{tmp_path}", reference=str(part), state="s")
    for hours in (0, 23):
        changed_at = time.time() - hours * 3600
        os.utime(part, (changed_at, changed_at))
        assert "ends too soon: it has 3000 bytes of at least" in candidate.missing()
    os.utime(part, (0, time.time() - 25 * 3600))
    said = fails_in_one_line(candidate.missing)
    assert f"{part} has not changed for a day, and the file ends too soon" in said
    shutil.copy(tiny_gguf, part)
    os.utime(part, (0, 0))
    assert candidate.missing() == ""


def test_one_of_several_gguf_files_is_refused(tmp_path):
    part = Candidate(source=f"folder:{tmp_path}", reference=str(tmp_path / "model-00001-of-00003.gguf"), state="s")
    with pytest.raises(InputError, match="one part of several"):
        part.require_supported_form()
    Candidate(
        source=f"folder:{tmp_path}", reference=str(tmp_path / "model-00001.gguf"), state="s"
    ).require_supported_form()


def test_a_hub_that_does_not_answer_is_one_line(start_python):
    code = """
from kvpolicy.errors import InputError
from kvpolicy.models.model_sources import ModelSource
try:
    ModelSource.parse("hub:owner/name").candidates()
except InputError as error:
    print("InputError:", error)
"""
    for variables in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        out, err = start_python(code, **variables).communicate(timeout=100)
        assert out.startswith("InputError: source hub:owner/name: the hub does not say which revision"), err
        assert out.count("\n") == 1
