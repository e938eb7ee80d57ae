from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import StorageError
from storage.lineage import code_fingerprint, module_digests, stage_key

BASE = {"stage": "train", "inputs": {"traces": "a" * 64}, "parameters": {"steps": 10, "lr": 0.1}, "code": "c" * 64}


def test_a_key_depends_on_everything_it_covers_and_on_nothing_else() -> None:
    changes = [
        {"stage": "collect"},
        {"inputs": {"traces": "b" * 64}},
        {"inputs": {"other": "a" * 64}},
        {"inputs": {}},
        {"parameters": {"steps": 11, "lr": 0.1}},
        {"parameters": {"steps": 10, "lr": 0.1, "seed": 0}},
        {"code": "d" * 64},
    ]
    keys = {stage_key(**{**BASE, **change}) for change in changes}
    assert len(keys | {stage_key(**BASE)}) == len(changes) + 1
    assert stage_key(**{**BASE, "parameters": {"lr": 0.1, "steps": 10}}) == stage_key(**BASE)
    assert len(stage_key(**BASE)) == 64


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    sources = {
        "shop/__init__.py": "",
        "shop/till.py": "import json\nfrom shop.money import coin\nfrom . import goods\n",
        "shop/money/__init__.py": "from shop.money.coin import Coin\n",
        "shop/money/coin.py": "class Coin: ...\n",
        "shop/goods.py": "def late():\n    from shop import shelf\n",
        "shop/shelf.py": "from depot.rack import Rack\n",
        "shop/window.py": "import shop.till\n",
        "shop/plugins/__init__.py": "import pkgutil\nnames = [m.name for m in pkgutil.iter_modules(__path__)]\n",
        "shop/plugins/one.py": "ONE = 1\n",
        "shop/loud.py": "raise SystemExit('imported!')\n",
        "depot/__init__.py": "",
        "depot/rack.py": "from ...nowhere import x\n",
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


PACKAGES = ("shop", "depot")


def test_the_closure_is_what_the_module_reaches(project: Path) -> None:
    closure = {"shop", "shop.till", "shop.money", "shop.money.coin", "shop.goods", "shop.shelf", "depot", "depot.rack"}
    assert set(module_digests("shop.till", PACKAGES)) == closure
    assert set(module_digests("shop.till", ("shop",))) == {name for name in closure if not name.startswith("depot")}


def test_the_fingerprint_changes_only_with_what_is_imported(project: Path) -> None:
    before = code_fingerprint("shop.till", PACKAGES)
    (project / "shop" / "window.py").write_text("changed = True\n")
    (project / "shop" / "new.py").write_text("")
    assert code_fingerprint("shop.till", PACKAGES) == before
    (project / "depot" / "rack.py").write_text("Rack = 1\n")
    assert code_fingerprint("shop.till", PACKAGES) != before


def test_imports_by_name_reach_the_whole_package(project: Path) -> None:
    before = code_fingerprint("shop.plugins", PACKAGES)
    (project / "shop" / "plugins" / "two.py").write_text("TWO = 2\n")
    assert code_fingerprint("shop.plugins", PACKAGES) != before
    assert "shop.loud" not in module_digests("shop.plugins", PACKAGES)


def test_nothing_is_imported(project: Path) -> None:
    assert set(module_digests("shop.loud", PACKAGES)) == {"shop", "shop.loud"}


def test_unknown_modules_and_broken_sources_are_one_line(project: Path) -> None:
    with pytest.raises(StorageError, match=r"no module shop\.none"):
        code_fingerprint("shop.none", PACKAGES)
    (project / "shop" / "coin.py").write_text("def (\n")
    with pytest.raises(StorageError, match="is no Python: line 1"):
        code_fingerprint("shop.coin", PACKAGES)
