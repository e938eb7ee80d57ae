"""Models of MLflow's registry: how they are written, and which of the logged files make a model."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.models.reference import find_model, is_hub_id, resolve_model
from kvpolicy.models.registered import RegisteredName, is_registered, model_parts, registered_place

LOGGED = {"model_binary": "model", "components": ["tokenizer"], "source_model_name": "owner/name"}
NAMES = st.text(string.ascii_letters + string.digits + " -._", min_size=1).filter(str.strip)


@given(NAMES, st.integers(1, 999), NAMES)
def test_a_name_is_read_as_it_is_written(name, number, alias):
    asked = RegisteredName(name=name, number=str(number))
    assert RegisteredName.of_reference(f"models:/{name}/{number}") == asked
    asked = RegisteredName(name=name, alias=alias)
    assert (
        RegisteredName.of_reference(f"models:/{name}@{alias}") == RegisteredName.of_source(f"{name}@{alias}") == asked
    )
    assert RegisteredName.of_source(name) == RegisteredName(name=name)


@pytest.mark.parametrize("text", ["", " ", "@", "name@", "@alias", "a/b", "a:b", "it's"])
def test_no_name_is_one_line(text, fails_in_one_line):
    assert repr(text) in fails_in_one_line(RegisteredName.of_source, text)


@pytest.mark.parametrize(
    "text", ["", "name", "name/", "name/latest", "name/1/2", "name@alias/1", "/1", "name/-1", "@a"]
)
def test_no_version_is_one_line(text, fails_in_one_line):
    said = fails_in_one_line(RegisteredName.of_reference, f"models:/{text}")
    assert repr(f"models:/{text}") in said and "models:/NAME/VERSION" in said


def test_a_registered_model_is_no_other_reference(tmp_path, fails_in_one_line):
    for reference in ("models:/name/1", "models:/name@alias"):
        assert is_registered(reference) and not is_hub_id(reference)
        for ask in (resolve_model, find_model):
            assert "MLflow's registry" in fails_in_one_line(ask, reference, cache=tmp_path)
    assert not is_registered("models/name")


def test_a_version_has_a_folder_of_its_own_whatever_it_is_called(tmp_path):
    places = {
        registered_place(name, identity * 8, tmp_path) for name in ("a b", "..", "ä") for identity in ("0123", "4567")
    }
    assert len(places) == 6
    assert {place.parent for place in places} == {tmp_path / "models"}


def test_the_two_folders_of_mlflow_s_flavour_and_a_plain_folder():
    assert model_parts("m", ["MLmodel", "model"], {"transformers": LOGGED}) == ["model", "components/tokenizer"]
    assert model_parts("m", ["config.json", "model.safetensors"], {}) == [""]


@pytest.mark.parametrize(
    ("files", "flavors", "said"),
    [
        (["policy.json", "policy.safetensors"], {}, "has policy.json, policy.safetensors: expected a model folder"),
        (["MLmodel"], {"sklearn": {}, "python_function": {}}, "is of flavour python_function, sklearn"),
        (["MLmodel"], {"transformers": LOGGED | {"peft_adaptor": "peft"}}, "is an adapter"),
        (["MLmodel"], {"transformers": LOGGED | {"model_binary": None}}, "no weights, it only names owner/name"),
        (["MLmodel"], {"transformers": LOGGED | {"components": []}}, "no tokenizer"),
    ],
)
def test_what_is_no_language_model_says_why(files, flavors, said, fails_in_one_line):
    assert said in fails_in_one_line(model_parts, "models:/name/1", files, flavors)
