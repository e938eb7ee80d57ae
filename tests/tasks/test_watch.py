"""Looking for models: what is new, what is not, what waits, and what is remembered of it."""

import dataclasses
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from kvpolicy.models.model_sources import ModelSource
from kvpolicy.models.reference import default_cache, resolve_model
from storage.catalog.catalog import Catalog
from storage.home import Home
from tasks.model import register_model
from tasks.watch import (
    ATTEMPTS,
    FAILED,
    FOUND,
    KNOWN,
    STARTED,
    UNSUPPORTED,
    WAITING,
    Sighting,
    check_model,
    look_for_models,
    remember,
    retry_later,
)
from tests.hub_server import hub_server
from tests.tiny_gguf import write_tiny_gguf


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def llama(tiny_model_folder, models: Path) -> Path:
    return Path(shutil.copytree(tiny_model_folder("llama", num_hidden_layers=2), models / "llama"))


def look(home: Home, *sources: Path | str, settle_s: float = 0.0) -> list[Sighting]:
    parsed = [ModelSource.parse(str(source) if ":" in str(source) else f"folder:{source}") for source in sources]
    return look_for_models.fn(home, parsed, settle_s=settle_s)


def start(home: Home, sighting: Sighting) -> Sighting:
    """What the flow does with a model that was found, but for the pipeline."""
    checked = check_model.fn(home, sighting, dtype="float32")
    remember(home, checked)
    if checked.outcome == FOUND:
        checked = dataclasses.replace(checked, outcome=STARTED, flow_run_id="flow-run")
        remember(home, checked)
    return checked


def outcomes(home: Home) -> list[str]:
    return [row["outcome"] for row in Catalog(home).rows("watched")]


def change_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_looking_finds_what_is_new_and_writes_nothing(home, llama, models):
    write_tiny_gguf(models / "tiny.gguf")
    before = files(home.path)
    found = look(home, models)
    assert [(Path(entry.reference).name, entry.outcome) for entry in found] == [("tiny.gguf", FOUND), ("llama", FOUND)]
    assert found[1].digest == resolve_model(str(llama)).digest
    assert files(home.path) == before
    assert not (models.parent / "cache" / "models").exists()  # nor was anything converted


def test_a_model_is_started_once(home, llama, models):
    write_tiny_gguf(models / "tiny.gguf")
    for sighting in look(home, models):
        ended = start(home, sighting)
        assert (ended.outcome, ended.model_digest) == (STARTED, resolve_model(sighting.reference).digest)
    assert look(home, models) == []
    assert outcomes(home) == [FOUND, STARTED] * 2


def test_the_same_content_again_is_known_and_other_weights_are_new(home, llama, models):
    (first,) = look(home, models)
    start(home, first)
    shutil.copytree(llama, models / "copy", copy_function=shutil.copy)
    (llama / "config.json").touch()
    again = look(home, models)
    assert {(Path(entry.reference).name, entry.outcome) for entry in again} == {("copy", KNOWN), ("llama", KNOWN)}
    for sighting in again:
        assert sighting.digest == first.digest and str(llama) in sighting.reason
        remember(home, sighting)
    assert look(home, models) == []
    change_weights(llama)
    (changed,) = look(home, models)
    assert (changed.reference, changed.outcome) == (str(llama), FOUND)
    assert changed.digest != first.digest
    assert start(home, changed).outcome == STARTED
    assert look(home, models) == []


def test_of_two_equal_ones_one_is_found(home, llama, models):
    shutil.copytree(llama, models / "copy")
    (first,) = look(home, models)
    start(home, first)
    (second,) = look(home, models)
    assert {first.reference, second.reference} == {str(llama), str(models / "copy")}
    assert second.outcome == KNOWN


def test_what_the_catalog_knows_is_not_started(home, llama, models):
    register_model.fn(home, str(llama), "float32")
    (sighting,) = look(home, models)
    assert sighting.outcome == KNOWN and "model-" in sighting.reason
    remember(home, sighting)
    assert look(home, models) == []


def test_what_a_watcher_began_is_its_own_even_if_the_catalog_knows_it(home, llama, models):
    (sighting,) = look(home, models)
    remember(home, sighting)  # and then the watcher was killed in the middle of the pipeline
    register_model.fn(home, str(llama), "float32")
    (again,) = look(home, models)
    assert again.outcome == FOUND
    assert start(home, again).outcome == STARTED
    assert outcomes(home) == [FOUND, STARTED]
    assert look(home, models) == []


def test_a_gguf_file_that_was_converted_for_a_run_is_known(home, models):
    gguf = write_tiny_gguf(models / "tiny.gguf")
    register_model.fn(home, str(gguf), "float32")
    (sighting,) = look(home, models)
    assert sighting.outcome == KNOWN


def test_an_unsupported_model_is_recorded_with_its_reason_and_never_tried_again(home, models, tiny_model_folder):
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = models / "gpt2-like"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder("llama"))
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=512, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (sighting,) = look(home, models)
    ended = start(home, sighting)
    assert ended.outcome == UNSUPPORTED and "rotary positions" in ended.reason
    assert look(home, models) == []
    shutil.copytree(folder, models / "copy")
    (copy,) = look(home, models)
    assert (copy.outcome, copy.reason) == (UNSUPPORTED, ended.reason)
    assert [(row["outcome"], row["reason"]) for row in Catalog(home).rows("watched")] == [(UNSUPPORTED, ended.reason)]


def test_a_gguf_file_that_no_one_can_read_is_unsupported(home, models):
    (models / "foreign.gguf").write_bytes(b"something else" * 100)
    shutil.copy(models / "foreign.gguf", models / "model-00001-of-00002.gguf")
    found = look(home, models)
    assert [entry.outcome for entry in found] == [FOUND, UNSUPPORTED]
    assert "one part of several" in found[1].reason
    ended = [start(home, found[0]), found[1]]
    remember(home, found[1])
    assert ended[0].outcome == UNSUPPORTED and "cannot be converted" in ended[0].reason and ".;" not in ended[0].reason
    assert look(home, models) == []


def test_a_half_copied_gguf_file_waits_and_then_is_taken(home, models, tmp_path):
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    place = models / "tiny.gguf"
    for length in (10, 3_000, len(whole) // 2, len(whole) - 500):
        place.write_bytes(whole[:length])
        (sighting,) = look(home, models)
        assert (sighting.outcome, sighting.digest, sighting.state) == (WAITING, "", "")
        remember(home, sighting)
    assert outcomes(home) == [WAITING]
    place.write_bytes(whole)
    (sighting,) = look(home, models)
    assert start(home, sighting).outcome == STARTED
    assert look(home, models) == []
    assert outcomes(home) == [WAITING, FOUND, STARTED]


def test_a_gguf_file_that_stays_cut_is_unsupported_after_a_day_and_looked_at_again_when_it_grows(
    home, models, tmp_path
):
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    place = models / "tiny.gguf"
    place.write_bytes(whole[:3_000])
    os.utime(place, (0, time.time() - 25 * 3600))
    (sighting,) = look(home, models)
    assert sighting.outcome == UNSUPPORTED and "has not changed for a day" in sighting.reason
    remember(home, sighting)
    assert look(home, models) == []
    place.write_bytes(whole[:4_000])
    (sighting,) = look(home, models)
    assert sighting.outcome == WAITING
    place.write_bytes(whole)
    (sighting,) = look(home, models)
    assert start(home, sighting).outcome == STARTED


def test_a_gguf_header_that_is_wrong_is_unsupported_at_once(home, models):
    gguf = write_tiny_gguf(models / "tiny.gguf")
    content = gguf.read_bytes()
    gguf.write_bytes(content[:4] + b"\x63" + content[5:])
    (sighting,) = look(home, models)
    assert sighting.outcome == UNSUPPORTED and "version 99" in sighting.reason
    remember(home, sighting)
    assert look(home, models) == []
    gguf.write_bytes(content)
    (again,) = look(home, models)
    assert again.outcome == FOUND


def test_files_that_still_change_wait(home, llama, models):
    stop = threading.Event()

    def copy_on() -> None:
        with (llama / "model.safetensors").open("ab") as stream:
            while not stop.is_set():
                stream.write(b"more")
                stream.flush()
                time.sleep(0.01)

    writer = threading.Thread(target=copy_on)
    writer.start()
    try:
        (sighting,) = look(home, models, settle_s=0.3)
    finally:
        stop.set()
        writer.join()
    assert (sighting.outcome, sighting.reason) == (WAITING, "its files are still changing")
    remember(home, sighting)
    (later,) = look(home, models)
    assert later.outcome == FOUND


def test_a_folder_that_came_without_all_its_weights_is_new_when_they_are_there(home, llama, models, tmp_path):
    whole = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(whole[:-1000])
    (half,) = look(home, models)
    assert start(home, half).outcome == UNSUPPORTED
    (llama / "model.safetensors").write_bytes(whole)
    (complete,) = look(home, models)
    assert complete.outcome == FOUND
    assert start(home, complete).outcome == STARTED


def test_what_fails_is_tried_again_but_not_for_ever(home, llama, models):
    for _ in range(ATTEMPTS):
        (sighting,) = look(home, models)
        remember(home, sighting)
        remember(home, dataclasses.replace(sighting, outcome=FAILED, reason="the disk is full"))
    assert look(home, models) == []
    assert outcomes(home) == [FOUND, FAILED] * ATTEMPTS


def test_what_could_not_even_be_tried_does_not_count(home, llama, models):
    for _ in range(ATTEMPTS + 1):
        (sighting,) = look(home, models)
        remember(home, sighting)
        remember(home, retry_later(sighting, "the server refuses"))
    (sighting,) = look(home, models)
    assert sighting.outcome == FOUND


def test_a_cache_that_cannot_be_made_is_no_fault_of_the_model(home, llama, models, tmp_path, monkeypatch):
    write_tiny_gguf(models / "tiny.gguf")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVP_CACHE", str(tmp_path / "file" / "cache"))
    found = look(home, models)
    ended = [start(home, sighting) if sighting.outcome == FOUND else sighting for sighting in found]
    assert [(entry.outcome, entry.digest) for entry in ended] == [(FAILED, "")] * 2
    assert all("KVP_CACHE" in entry.reason for entry in ended)
    monkeypatch.setenv("KVP_CACHE", str(tmp_path / "cache"))
    assert [start(home, sighting).outcome for sighting in look(home, models)] == [STARTED] * 2


def test_a_source_that_cannot_be_looked_at_is_one_record_and_the_others_go_on(home, llama, models, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for _ in range(2):
        found = look(home, models.parent / "gone", "hub:owner/name", models)
        assert [entry.outcome for entry in found] == [FAILED, FAILED, FOUND]
        assert [entry.reference for entry in found[:2]] == [f"folder:{models.parent / 'gone'}", "hub:owner/name"]
        assert all(entry.reason and "\n" not in entry.reason for entry in found[:2])
        for sighting in found[:2]:
            remember(home, sighting)
    assert outcomes(home) == [FAILED, FAILED]


def test_every_revision_of_a_repository_is_a_model_of_its_own(home, llama, monkeypatch):
    import huggingface_hub.constants

    with hub_server(llama) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        files_at = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files_at)
        (first,) = look(home, "hub:owner/name")
        assert (first.reference, first.digest) == (f"owner/name@{hub.commit}", hub.commit)
        ended = start(home, first)
        assert (ended.outcome, ended.reason) == (STARTED, "")
        assert ended.model_digest == resolve_model(str(llama)).digest
        assert look(home, "hub:owner/name") == []
        change_weights(llama)
        (second,) = look(home, "hub:owner/name")
        assert second.digest == hub.commit != first.digest
        assert start(home, second).outcome == STARTED
        assert look(home, "hub:owner/name") == []
        assert look(home, f"hub:owner/name@{hub.commit}") == []


def test_a_repository_that_needs_its_code_is_unsupported_before_its_weights_are_fetched(home, llama, monkeypatch):
    import huggingface_hub.constants

    config = json.loads((llama / "config.json").read_text())
    code = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig"}}
    (llama / "config.json").write_text(json.dumps(config | code))
    with hub_server(llama) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        files_at = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files_at)
        (sighting,) = look(home, "hub:owner/name")
        ended = start(home, sighting)
    assert ended.outcome == UNSUPPORTED
    assert ended.reason.startswith(
        f"model {sighting.reference}: config.json names code of its own (theirs.TheirConfig)"
    )
    assert not list(default_cache().rglob("*.safetensors"))
