"""A request means the same when it is read back, in any working folder and whatever the presets have become."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.request import Request
from flows.runtime.run_options import Choices
from kvpolicy.errors import InputError
from kvpolicy.methods.registry import method_names
from kvpolicy.presets.pipeline_config import load_preset, preset_names, read_config
from storage.errors import StorageError
from storage.lineage.artifacts import Artifact

TASKS = ["niah_single_1", "vt", "fwe"]


@given(
    preset=st.sampled_from(preset_names()),
    seed=st.integers(0, 2**63 - 1),
    tasks=st.none() | st.lists(st.sampled_from(TASKS), min_size=1, unique=True),
    methods=st.none() | st.lists(st.sampled_from(method_names()), min_size=1, unique=True),
    objective=st.sampled_from([None, "exact", "rloo"]),
)
def test_what_is_written_is_read_back(preset, seed, tasks, methods, objective):
    choices = Choices(tasks=tasks, methods=methods, objective=objective)
    request = Request.make(preset=preset, model="embedded", seed=seed, choices=choices)
    stored = Artifact.from_row(request.to_artifact().to_row())  # through the catalog's JSON
    assert Request.from_artifact(stored) == request
    assert Request.from_artifact(stored).to_artifact().artifact_id == stored.artifact_id


def test_paths_mean_the_same_in_another_working_folder(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "book.txt").write_text("A text.")
    monkeypatch.chdir(tmp_path)
    choices = Choices(tasks=["niah_single_2"], data=["essays=book.txt", "boolq=hub:google/boolq@main/dev.parquet"])
    request = Request.make(preset="smoke", model="model", seed=0, choices=choices)
    monkeypatch.chdir("/")
    assert request.model == str(tmp_path / "model")
    assert request.choices.configure("smoke") == request.config
    assert request.choices.data == [f"essays={tmp_path / 'book.txt'}", "boolq=hub:google/boolq@main/dev.parquet"]


def test_a_hub_id_stays_what_it_is():
    request = Request.make(preset="smoke", model="owner/name@rev", seed=0, choices=Choices())
    assert request.model == "owner/name@rev"


def test_what_this_release_does_not_know_is_told():
    artifact = Request.make(preset="smoke", model="embedded", seed=0, choices=Choices()).to_artifact()
    content = dict(artifact.metadata)
    later = {**content, "choices": {**content["choices"], "mood": "good"}}
    with pytest.raises(StorageError, match="has the choices mood, which this release does not know"):
        Request.from_artifact(dataclasses.replace(artifact, metadata=later))
    later = {**content, "config": {**content["config"], "train": {"mood": "good"}}}
    with pytest.raises(InputError, match=r"^request-.*: train\.mood is unknown: use the release that recorded it"):
        Request.from_artifact(dataclasses.replace(artifact, metadata=later))


@pytest.mark.parametrize("name", preset_names())
def test_a_configuration_is_read_from_its_plain_values(name):
    values = dataclasses.asdict(load_preset(name))
    assert values.pop("preset") == name
    assert read_config(values, name=name) == load_preset(name)
