"""The page on new benchmarks, followed: two files on a copy of the tree, and a package of two files."""

import json
import os
import re

import pytest
from outcomes import catalog
from processes import CHECKOUT
from sources import copied_sources

from storage.catalog.run_differences import recorded_modules
from tests.installed_packages import install

PAGE = (CHECKOUT / "docs" / "how-to" / "new-benchmark.md").read_text()
MODULE, IMPORT = re.findall(r"```python\n(.+?)```", PAGE, flags=re.DOTALL)
(LINE,), (PROJECT,) = (re.findall(rf"```{kind}\n(.+?)```", PAGE, flags=re.DOTALL) for kind in ("text", "toml"))
LAST = "        for task in choices.TASKS\n    ),\n"
FIRST_IMPORT = "from kvpolicy.benchmarks.ruler.fingerprint"
PACKAGE = "kvp-colours (package)"
OPTIONS = ("--tasks", "colour_of", "--methods", "random,knorm")


@pytest.fixture
def sources(tmp_path):
    """A copy of the product that has the page's benchmark."""
    place = copied_sources(tmp_path)
    (place / "kvpolicy" / "benchmarks" / "colours.py").write_text(MODULE)
    registry = place / "kvpolicy" / "benchmarks" / "registry.py"
    text = registry.read_text()
    assert text.count(LAST) == text.count(FIRST_IMPORT) == 1
    registry.write_text(text.replace(LAST, LAST + LINE).replace(FIRST_IMPORT, IMPORT + FIRST_IMPORT))
    return place


@pytest.fixture
def stale(kvp):
    """Causes by stage."""

    def ask(home, path):
        finished = kvp("stale", "--json", home=home, PYTHONPATH=path)
        assert finished.code == 0, finished.stderr
        causes = {}
        for row in json.loads(finished.stdout):
            causes.setdefault(row["stage"], set()).add(row["name"])
        return causes

    return ask


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_benchmark_of_two_files_is_evaluated_and_makes_nothing_stale(kvp, small_run, sources, stale, tmp_path):
    path, home = str(sources), tmp_path / "home"
    assert "colour_of" in kvp("benchmarks", PYTHONPATH=path).stdout
    assert stale(small_run.home, path) == {}
    finished = kvp("evaluate", *small_run.options, *OPTIONS, home=home, PYTHONPATH=path)
    assert finished.code == 0, finished.stderr
    points = catalog(home).rows("curves", "task = 'colour_of'")
    assert points and {point["benchmark"] for point in points} == {"colours"}
    with (sources / "kvpolicy" / "benchmarks" / "colours.py").open("a") as stream:
        stream.write("\nCHANGED = 1\n")
    assert stale(small_run.home, path) == {}
    changed = stale(home, path)
    assert changed["prompts test"] == changed["prompts train"] == {"kvpolicy.benchmarks.colours"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_benchmark_of_a_package_has_a_lineage_of_its_own(kvp, small_run, stale, tmp_path):
    files = {"pyproject.toml": PROJECT, "kvp_colours.py": MODULE}
    place = install(files, source=tmp_path / "one", into=tmp_path / "site-packages")
    home, path = tmp_path / "home", os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    assert "colour_of" in kvp("benchmarks", PYTHONPATH=path).stdout
    finished = kvp("evaluate", *small_run.options, *OPTIONS, home=home, PYTHONPATH=path)
    assert finished.code == 0, finished.stderr
    (prompts, *_) = catalog(home).rows("runs", "stage = 'prompts'")
    modules = recorded_modules(catalog(home), catalog(home).completed_run(prompts))
    assert modules[PACKAGE] == "1.0" and "kvp_colours" in modules
    assert stale(home, path) == {}
    released = PROJECT.replace('version = "1.0"', 'version = "1.1"')
    install({**files, "pyproject.toml": released}, source=tmp_path / "two", into=place)
    changed = stale(home, path)
    assert changed["prompts test"] == {PACKAGE} and PACKAGE in changed["evaluate"]
