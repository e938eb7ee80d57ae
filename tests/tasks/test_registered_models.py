"""Models of MLflow's registry as sources and as models: a real registry, with what MLflow itself has logged."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kvpolicy.errors import InputError
from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.model_folder import TEMPLATES
from kvpolicy.models.model_sources import ModelSource
from kvpolicy.models.reference import resolve_model
from kvpolicy.names import CHAMPION
from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.client import open_client
from storage.mlflow.tracking import Tracking
from tasks.inputs.loaded_model import load_model
from tasks.model import find, recorded_model, register_model, resolve
from tasks.watch import FAILED, FOUND, KNOWN, STARTED, UNSUPPORTED, check_model, look_for_models, remember
from tests.mlflow_models import log_folder, log_transformers

RESOLVE = """
import sys
from storage.home import Home
from tasks.model import resolve
resolve(Home.open(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture
def home(mlflow_home: Home) -> Home:
    return mlflow_home


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def llama(tiny_model_folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_folder("llama", num_hidden_layers=2), tmp_path / "llama"))


def look(home: Home, *sources: str):
    return look_for_models.fn(home, [ModelSource.parse(source) for source in sources], settle_s=0.0)


def start(home: Home, sighting):
    """What the flow does with a model that was found, but for the pipeline."""
    checked = check_model.fn(home, sighting, dtype="float32")
    remember(home, checked)
    if checked.outcome == FOUND:
        checked = dataclasses.replace(checked, outcome=STARTED)
        remember(home, checked)
    return checked


@pytest.mark.parametrize("log", [log_transformers, log_folder])
def test_what_was_logged_is_the_model_that_it_was(home, cache, llama, log):
    reference = f"models:/tiny llama/{log(home, llama, 'tiny llama')}"
    assert find(home, reference) is None
    found = resolve(home, reference)
    assert found == find(home, reference)
    assert (found.name, found.source, len(found.revision)) == ("tiny llama", reference, 32)
    assert [path.name for path in (cache / "models").iterdir()] == [found.folder.name]  # and no draft
    logged, original = load_language_model(found.folder, dtype="float32"), load_language_model(llama, dtype="float32")
    for name, weights in original.network.state_dict().items():
        assert torch.equal(logged.network.state_dict()[name], weights), name
    assert logged.spec == original.spec
    text = [{"role": "user", "content": "Weiß \n and <|end|>"}]
    assert logged.tokenizer.apply_chat_template(text) == original.tokenizer.apply_chat_template(text)
    if log is log_folder:
        assert found.digest == resolve_model(str(llama)).digest


def test_a_version_is_fetched_once_and_damage_is_told(home, cache, llama):
    reference = f"models:/llama/{log_folder(home, llama, 'llama')}"
    folder = resolve(home, reference).folder
    shutil.rmtree(home.mlflow_artifacts)
    assert resolve(home, reference).folder == folder
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=rf"model.safetensors does not match .* delete the folder {folder}"):
        resolve(home, reference)
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=r"no files of models:/llama/1 at .*empty or lost"):
        resolve(home, reference)
    assert list((cache / "models").iterdir()) == []


def test_the_catalog_has_the_reference_and_a_repetition_finds_the_model(home, cache, llama):
    reference = f"models:/llama/{log_folder(home, llama, 'llama')}"
    open_client(home).set_registered_model_alias("llama", "best", "1")
    registered = register_model.fn(home, "models:/llama@best", "float32")
    (row,) = Catalog(home).rows("models")
    assert (row["source"], row["name"], row["digest"]) == (reference, "llama", registered.digest)
    metadata = Catalog(home).artifact(registered.artifact_id).metadata
    assert metadata == {"source": reference, "revision": row["revision"]}
    assert load_model(registered).spec.num_heads == registered.num_heads
    again = recorded_model(home, registered.artifact_id, dtype="float32", source=reference)
    assert again == registered
    shutil.rmtree(cache)
    with pytest.raises(InputError, match="is lost"):
        recorded_model(home, registered.artifact_id, dtype="float32", source=reference)
    resolve(home, reference)
    assert recorded_model(home, registered.artifact_id, dtype="float32", source=reference) == registered


@pytest.mark.parametrize(
    ("reference", "said"),
    [(name, f"no {name} in MLflow's registry") for name in ("models:/none/1", "models:/llama/9", "models:/llama@best")],
)
def test_what_is_not_there_is_one_line(home, llama, tmp_path, reference, said):
    bare = Home.open(tmp_path / "bare")
    with pytest.raises(StorageError, match="is not there yet"):
        resolve(bare, reference)
    assert not bare.mlflow.exists()
    log_folder(home, llama, "llama")
    with pytest.raises(StorageError, match=said) as refused:
        resolve(home, reference)
    assert "\n" not in str(refused.value)


def test_each_version_is_started_once(home, cache, llama):
    log_transformers(home, llama, "llama")
    before = {path: path.stat().st_mtime_ns for path in home.path.rglob("*")}
    (first,) = look(home, "mlflow:llama")
    assert {path: path.stat().st_mtime_ns for path in home.path.rglob("*")} == before and not cache.exists()
    assert (first.reference, first.outcome, first.digest) == ("models:/llama/1", FOUND, first.state)
    ended = start(home, first)
    assert (ended.outcome, ended.model_digest) == (STARTED, resolve(home, "models:/llama/1").digest)
    assert look(home, "mlflow:llama") == []

    log_transformers(home, llama, "llama")  # the same content as another version
    (second,) = look(home, "mlflow:llama")
    assert (second.reference, second.outcome) == ("models:/llama/2", FOUND)
    assert second.digest != first.digest
    register_model.fn(home, "models:/llama/1", "float32")  # as the pipeline of the first would have done
    assert start(home, second).outcome == KNOWN
    assert look(home, "mlflow:llama") == []


def test_an_alias_shows_the_version_that_it_points_at(home, cache, llama):
    for _ in range(2):
        log_folder(home, llama, "llama")
    for source in ("mlflow:llama@best", "mlflow:none"):
        (missing,) = look(home, source)
        assert (missing.outcome, missing.reference) == (FAILED, source)
    for number in ("1", "2"):
        open_client(home).set_registered_model_alias("llama", "best", number)
        (sighting,) = look(home, "mlflow:llama@best")
        assert sighting.reference == f"models:/llama/{number}"


def test_what_is_no_model_is_recorded_with_its_reason_and_not_looked_at_again(home, cache, tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "policy.json").write_text("{}")
    tracking = Tracking(home)
    run_id = tracking.start_parent(experiment="e", name="train", tags={}, timestamp_ms=1)
    tracking.register_policy(name="kvpolicy-x", folder=tmp_path / "policy", run_id=run_id, tags={}, description="")
    (sighting,) = look(home, "mlflow:kvpolicy-x")
    ended = start(home, sighting)
    assert ended.outcome == UNSUPPORTED
    assert ended.reason.startswith("models:/kvpolicy-x/1 has policy.json: expected a model folder")
    assert look(home, "mlflow:kvpolicy-x") == []
    assert CHAMPION not in open_client(home).get_registered_model("kvpolicy-x").aliases
    assert list((cache / "models").iterdir()) == [] if cache.exists() else True


def test_a_version_that_needs_its_code_is_refused_before_its_weights_are_fetched(home, cache, llama):
    config = json.loads((llama / "config.json").read_text())
    code = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig"}}
    (llama / "config.json").write_text(json.dumps(config | code))
    (llama / "model.safetensors").write_bytes(b"no weights, which nobody reads")
    log_folder(home, llama, "theirs")
    with pytest.raises(
        InputError, match=r"^model models:/theirs/1: config.json names code of its own \(theirs.TheirConfig"
    ):
        resolve(home, "models:/theirs/1")
    assert list((cache / "models").iterdir()) == []


def test_a_version_keeps_the_templates_that_it_has_more_of(home, cache, llama):
    (llama / TEMPLATES).mkdir()
    (llama / TEMPLATES / "default.jinja").write_text("another")
    log_folder(home, llama, "llama")
    found = resolve(home, "models:/llama/1")
    assert found.digest == resolve_model(str(llama)).digest
    assert (found.folder / TEMPLATES / "default.jinja").read_text() == "another"
    (found.folder / TEMPLATES / "default.jinja").write_text("damaged")
    with pytest.raises(InputError, match=r"default.jinja does not match its recorded SHA-256"):
        resolve(home, "models:/llama/1")


def test_a_registry_that_cannot_be_reached_is_tried_again(home, cache, llama):
    log_folder(home, llama, "llama")
    (sighting,) = look(home, "mlflow:llama")
    moved = home.mlflow_artifacts.rename(home.mlflow / "moved")
    ended = start(home, sighting)
    assert (ended.outcome, ended.digest) == (FAILED, "") and "empty or lost" in ended.reason
    moved.rename(home.mlflow_artifacts)
    (again,) = look(home, "mlflow:llama")
    assert start(home, again).outcome == STARTED


@pytest.mark.slow
def test_whoever_is_killed_while_fetching_leaves_no_folder(home, cache, llama):
    with (llama / "model.bin").open("wb") as stream:
        stream.truncate(1 << 28)  # takes a while to copy and to digest
    reference = f"models:/llama/{log_folder(home, llama, 'llama')}"
    process = subprocess.Popen([sys.executable, "-c", RESOLVE, str(home.path), reference])
    try:
        deadline = time.monotonic() + 60
        while not list(cache.glob("models/.*/*")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path.name for path in (cache / "models").iterdir() if not path.name.startswith(".")] == []
    assert find(home, reference) is None
