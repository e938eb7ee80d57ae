from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import StorageError
from storage.fingerprints import ProjectCode, stage_key

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


def digests(
    module: str, *, packages: tuple[str, ...] = ("shop", "depot"), without: tuple[str, ...] = ()
) -> dict[str, str]:
    return ProjectCode(*packages).module_digests(module, without=without)


def test_the_closure_is_what_the_module_reaches(project: Path) -> None:
    closure = {"shop", "shop.till", "shop.money", "shop.money.coin", "shop.goods", "shop.shelf", "depot", "depot.rack"}
    assert set(digests("shop.till")) == closure
    assert set(digests("shop.till", packages=("shop",))) == {name for name in closure if not name.startswith("depot")}
    assert set(digests("shop.till", without=("shop.goods",))) == closure - {
        "shop.goods",
        "shop.shelf",
        "depot",
        "depot.rack",
    }
    assert set(ProjectCode("shop").module_digests("shop.window", "shop.loud")) >= {"shop.till", "shop.loud"}


def test_digests_change_only_with_what_is_imported(project: Path) -> None:
    before = digests("shop.till")
    (project / "shop" / "window.py").write_text("changed = True\n")
    (project / "shop" / "new.py").write_text("")
    assert digests("shop.till") == before
    (project / "depot" / "rack.py").write_text("Rack = 1\n")
    after = digests("shop.till")
    assert {name for name in before if after[name] != before[name]} == {"depot.rack"}


SOURCE = '''
import math

class Shelf:
    """Holds things."""

    width: float = 1.0
    """In metres."""

    def area(self, depth):
        """Return an area."""
        return self.width * depth + math.sqrt(4)

def label(shelf):
    return f"{shelf.width:.2f} m", "wide"
'''


@pytest.mark.parametrize(
    "change",
    [
        ('    """Holds things."""\n', ""),
        ("Holds things", "Carries things"),
        ('    """In metres."""\n', ""),
        ("import math\n", "# A remark.\nimport math  # another\n\n\n"),
        (
            "self.width * depth + math.sqrt(4)",
            "(\n self.width * depth\n + math.sqrt(4)\n)",
        ),
        ('"wide"', "'wide'"),
    ],
    ids=["a docstring goes", "a docstring", "a text below a field", "comments", "layout", "quotes"],
)
def test_a_digest_keeps_to_the_meaning_of_a_source(project: Path, change: tuple[str, str]) -> None:
    before = _digest_of(project, SOURCE)
    assert _digest_of(project, SOURCE.replace(*change)) == before != _digest_of(project, "")


@pytest.mark.parametrize(
    "change",
    [
        ("1.0", "1"),
        ("1.0", "True"),
        ("float = 1.0", "int = 1.0"),
        ("* depth +", "+ depth *"),
        ("sqrt(4)", "sqrt(4.0)"),
        (":.2f", ":.3f"),
        ('"wide"', 'b"wide"'),
        ('"wide"', "None"),
        ("return f", "yield f"),
        ("import math", "import cmath as math"),
        ("def area(self, depth)", "def area(self, depth=1)"),
        ("def area(self, depth)", "async def area(self, depth)"),
    ],
    ids=" to ".join,
)
def test_a_digest_changes_with_the_meaning_of_a_source(project: Path, change: tuple[str, str]) -> None:
    assert SOURCE.replace(*change) != SOURCE
    assert _digest_of(project, SOURCE.replace(*change)) != _digest_of(project, SOURCE)


def _digest_of(project: Path, source: str) -> str:
    (project / "shop" / "changing.py").write_text(source)
    return digests("shop.changing")["shop.changing"]


def test_files_that_change_later_change_nothing(project: Path) -> None:
    code = ProjectCode("shop", "depot")
    before = code.module_digests("shop.till")
    (project / "depot" / "rack.py").write_text("Rack = 1\n")
    assert code.module_digests("shop.till") == before != digests("shop.till")


def test_imports_by_name_reach_the_whole_package(project: Path) -> None:
    before = digests("shop.plugins")
    (project / "shop" / "plugins" / "two.py").write_text("TWO = 2\n")
    assert digests("shop.plugins").keys() - before == {"shop.plugins.two"}
    assert "shop.loud" not in before


def test_a_single_file_is_a_package_of_its_own(project: Path) -> None:
    (project / "kiosk.py").write_text("from shop.money import coin\n")
    assert set(digests("kiosk")) == {"kiosk", "shop", "shop.money", "shop.money.coin"}


def test_nothing_is_imported(project: Path) -> None:
    assert set(digests("shop.loud")) == {"shop", "shop.loud"}


def test_unknown_modules_and_broken_sources_are_one_line(project: Path) -> None:
    with pytest.raises(StorageError, match=r"no module shop\.none"):
        digests("shop.none")
    (project / "shop" / "coin.py").write_text("def (\n")
    with pytest.raises(StorageError, match="is no Python: line 1"):
        digests("shop.coin")
