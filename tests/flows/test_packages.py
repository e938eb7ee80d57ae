"""A method from a package of two files, installed by pip: run, recorded, stale alone when its package changes."""

import json
import os

import pytest
from outcomes import catalog

from storage.catalog.run_differences import recorded_modules
from tests.installed_packages import documented_package, install

PACKAGE = "kvp-value-norm (package)"
MODULE = "kvp_value_norm"


@pytest.mark.slow  # pip, a pipeline and `kvp stale`, each a process
def test_a_method_of_a_package_has_a_lineage_of_its_own(kvp, small_run, tmp_path):
    files = documented_package()
    place = install(files, source=tmp_path / "one", into=tmp_path / "site-packages")
    home, path = tmp_path / "home", os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    assert "value_norm" in kvp("methods", PYTHONPATH=path).stdout

    methods = small_run.options[small_run.options.index("--methods") + 1]
    finished = kvp("run", *small_run.options, "--methods", f"{methods},value_norm", home=home, PYTHONPATH=path)
    assert finished.code == 0, finished.stderr
    points = catalog(home).rows("curves", "method = 'value_norm'")
    assert points and all(point["value"] is not None for point in points)
    (run,) = catalog(home).rows("runs", "stage = 'evaluate'")
    modules = recorded_modules(catalog(home), catalog(home).completed_run(run))
    assert modules[PACKAGE] == "1.0" and len(modules[MODULE]) == 64
    (training,) = catalog(home).rows("runs", "stage = 'train'")
    assert PACKAGE not in recorded_modules(catalog(home), catalog(home).completed_run(training))

    def stale() -> dict[str, set[str]]:
        finished = kvp("stale", "--json", home=home, PYTHONPATH=path)
        assert finished.code == 0, finished.stderr
        causes: dict[str, set[str]] = {}
        for row in json.loads(finished.stdout):
            causes.setdefault(row["stage"], set()).add(row["name"])
        return causes

    assert stale() == {}
    released = files["pyproject.toml"].replace('version = "1.0"', 'version = "1.1"')
    install({**files, "pyproject.toml": released}, source=tmp_path / "two", into=place)
    assert stale() == {"evaluate": {PACKAGE}}
    changed = files[f"{MODULE}.py"].replace("norm(dim=-1)", "norm(dim=-1, p=1)")
    install({"pyproject.toml": released, f"{MODULE}.py": changed}, source=tmp_path / "three", into=place)
    assert stale() == {"evaluate": {PACKAGE, MODULE}}
