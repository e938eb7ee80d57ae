"""What packages offer under a name: as pip installs them, in this process."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.config.registry import Choice, installed_extensions
from kvpolicy.errors import InputError
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.methods.base import CacheState
from kvpolicy.methods.registry import DEFAULT_METHODS, METHODS, make_method, method_names, method_type
from kvpolicy.objectives.registry import OBJECTIVES, make_objective
from kvpolicy.training.policy_training import TrainConfig
from tests.installed_packages import documented_package, install

Installed = Callable[..., Path]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """Installs packages for the time of a test: from a name, modules and entry points, or files as they are."""
    place = tmp_path / "site-packages"
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    before = set(sys.modules)

    def make(name: str, entry_points: str, **modules: str) -> Path:
        """Lay a package out as pip does: modules, and metadata beside them."""
        for module, text in modules.items():
            (place / f"{module}.py").write_text(text)
        metadata = place / f"{name.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()
        installed_extensions.cache_clear()
        return place

    yield make
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(place)):
            del sys.modules[name]
    METHODS._loaded.clear()
    OBJECTIVES._loaded.clear()
    installed_extensions.cache_clear()


METHOD = documented_package()["kvp_value_norm.py"]


def test_a_method_of_a_package_is_one_of_all(installed: Installed) -> None:
    ours = method_names()
    installed("kvp-value-norm", "[kvpolicy.methods]\nvalue_norm = kvp_value_norm:ValueNorm\n", kvp_value_norm=METHOD)
    assert method_names() == (*ours[:-2], "value_norm", *ours[-2:])
    assert EvaluateConfig().methods == DEFAULT_METHODS  # it takes part where it is named
    config = EvaluateConfig(methods=("value_norm", "snapkv"))
    assert config.contenders == ("snapkv", "value_norm", "full", "oracle")
    assert METHODS.choices(config.contenders) == (
        Choice(module="kvpolicy.methods.snapkv"),
        Choice(module="kvp_value_norm", package="kvp-value-norm", version="1.0"),
        Choice(module="kvpolicy.methods.full"),
        Choice(module="kvpolicy.methods.oracle"),
    )
    values = torch.randn(2, 5, 4)
    state = CacheState(
        keys=torch.randn(2, 5, 4),
        values=values,
        queries=torch.randn(2, 1, 0, 4),
        positions=torch.arange(5)[None],
        num_kv_heads=2,
        scaling=LogitScale(factor=0.5),
    )
    torch.testing.assert_close(make_method("value_norm").score(state), values.square().sum(dim=-1).sqrt())


def test_an_objective_of_a_package_trains(installed: Installed) -> None:
    source = "def spread(scores, importance, mask=None):\n    return (scores.var(dim=-1) * importance.sum(dim=-1))\n"
    installed("kvp-spread", "[kvpolicy.objectives]\nspread = kvp_spread:spread\n", kvp_spread=source)
    config = TrainConfig(objective="spread")
    loss = make_objective(config.objective, num_rankings=2, generator=torch.Generator())
    scores, importance = torch.randn(3, 7), torch.rand(3, 7)
    torch.testing.assert_close(loss(scores, importance, None), scores.var(dim=-1) * importance.sum(dim=-1))
    assert OBJECTIVES.choices(["spread"]) == (Choice(module="kvp_spread", package="kvp-spread", version="1.0"),)


def test_nothing_of_a_package_is_imported_before_it_is_chosen(installed: Installed) -> None:
    installed("kvp-loud", "[kvpolicy.methods]\nloud = kvp_loud:Loud\n", kvp_loud="raise SystemExit('imported!')\n")
    assert "loud" in method_names()
    assert EvaluateConfig(methods=("snapkv",)).contenders == ("snapkv", "full", "oracle")


@pytest.mark.parametrize(
    ("entry", "source", "reason"),
    [
        ("broken:Broken", "import nowhere_to_be_found\n", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("broken:Missing", "", "AttributeError: .*Missing"),
        ("broken:Broken", "class Broken: ...\n", "it is not a subclass of kvpolicy.methods.base.Method"),
        ("broken:ValueNorm", METHOD, "its class is named 'value_norm'"),
        ("broken:ValueNorm", METHOD.replace("reference =", "cited ="), "its class has no reference"),
    ],
    ids=["its import fails", "no such class", "another class", "another name", "a field is missing"],
)
def test_a_method_that_cannot_be_used_is_one_line(installed: Installed, entry: str, source: str, reason: str) -> None:
    installed("kvp-broken", f"[kvpolicy.methods]\nbroken = {entry}\n", broken=source)
    with pytest.raises(InputError, match=f"^method 'broken' of package kvp-broken 1.0 cannot be used: {reason}.*$"):
        method_type("broken")


def test_a_name_that_is_taken_is_one_line(installed: Installed) -> None:
    installed("kvp-other", "[kvpolicy.methods]\nsnapkv = kvp_other:SnapKV\n")
    with pytest.raises(InputError, match=r"kvp-other 1\.0 offers a method 'snapkv', a name that kvpolicy itself has"):
        method_names()
    assert method_type("snapkv").__module__ == "kvpolicy.methods.snapkv"


def test_two_packages_with_one_name_are_one_line(installed: Installed) -> None:
    installed("kvp-one", "[kvpolicy.methods]\ntwice = kvp_one:One\n")
    installed("kvp-two", "[kvpolicy.methods]\ntwice = kvp_two:Two\n")
    with pytest.raises(InputError, match=re.escape("kvp-two 1.0 offers a method 'twice', a name that package kvp-one")):
        method_names()


@pytest.mark.slow  # pip
def test_the_package_of_the_page_is_installed_by_pip(tmp_path: Path) -> None:
    files = documented_package()
    assert files.keys() == {"pyproject.toml", "kvp_value_norm.py"}
    place = install(files, source=tmp_path / "source", into=tmp_path / "site-packages")
    assert (place / "kvp_value_norm.py").read_text() == METHOD
    (entry_points,) = place.glob("kvp_value_norm-1.0.dist-info/entry_points.txt")
    assert "value_norm = kvp_value_norm:ValueNorm" in entry_points.read_text()
