"""What users import from the package itself, and a policy that goes from one machine to another in its folder."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy import Generation, InputError, compressed_generate, load_model, load_policy
from storage.fingerprints import ProjectCode
from tests.drawn_policy import draw_policy

STUB = Path(kvpolicy.__file__).with_suffix(".pyi")


def test_the_types_that_editors_see_are_those_of_what_there_is():
    declared = {
        alias.asname: f"{node.module}:{alias.name}" for node in ast.parse(STUB.read_text()).body for alias in node.names
    }
    assert declared == kvpolicy._PUBLIC
    assert sorted(kvpolicy.__all__) == sorted(declared)
    assert set(declared) <= set(dir(kvpolicy))
    assert [getattr(kvpolicy, name).__name__ for name in kvpolicy.__all__] == kvpolicy.__all__


def test_nothing_heavy_is_loaded_before_it_is_asked_for():
    code = "import sys, kvpolicy; assert not {'torch', 'transformers'} & set(sys.modules); kvpolicy.load_policy"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


_WITHOUT_TORCH = """
import importlib, pkgutil, sys
sys.modules |= {"torch": None, "transformers": None}  # importing them fails
import kvpolicy, kvpolicy.config, kvpolicy.results
from kvpolicy import digests, errors, names, seeds
for package in (kvpolicy.config, kvpolicy.results):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import dashboards.app.server, dashboards.report.comparing, dashboards.report.writing
from kvpolicy.results.budget_curves import resample_scores
from kvpolicy.results.scores import ExampleScore
from kvpolicy.results.comparisons import compare_methods
from kvpolicy.results.statistics import Bootstrap
scores = [
    ExampleScore(sample_id=str(i), benchmark="b", task="t", setting="s", method=method, seed=0, budget=64, metric="kl",
                 value=i + (method == "knorm"))
    for method in ("kvp", "knorm") for i in range(8)
]
found = compare_methods(resample_scores(scores, Bootstrap(seed=0)), {"kvp": "policy_set"})
assert [(one.method, one.verdict) for one in found] == [("kvp", "better"), ("knorm", "worse")]
"""


def test_the_ground_floor_and_the_dashboards_work_where_torch_cannot_be_imported():
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=True, timeout=120)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'load_polcy'"):
        kvpolicy.load_polcy  # noqa: B018


def test_what_only_users_call_is_in_no_fingerprint_of_a_stage():
    covered = ProjectCode("kvpolicy", "tasks").module_digests("tasks.collect")
    assert "kvpolicy" in covered
    assert "kvpolicy.inference.generation" not in covered


def test_a_policy_in_a_folder_is_used_where_the_folder_is(tiny_model_folder, tmp_path):
    trained_on = load_model(str(tiny_model_folder("llama")), dtype="float32")
    policy = draw_policy(trained_on)
    policy.save(tmp_path / "here")
    expected = compressed_generate(trained_on, policy, "x" * 60, budget=30, max_new_tokens=8)
    assert isinstance(expected, Generation)

    shutil.move(tmp_path / "here", tmp_path / "elsewhere")
    shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    model = load_model(str(tmp_path / "model"), dtype="float32")
    found = load_policy(str(tmp_path / "elsewhere"))
    assert compressed_generate(model, found, "x" * 60, budget=30, max_new_tokens=8) == expected

    other = load_model(str(tiny_model_folder("llama", rms_norm_eps=1e-4)), dtype="float32")
    assert other.spec == trained_on.spec
    with pytest.raises(InputError, match=f"trained for model {trained_on.digest[:16]}, not for {other.digest[:16]}"):
        compressed_generate(other, found, "x", budget=30)
