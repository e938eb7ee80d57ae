from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from storage.errors import StorageError
from storage.home import FORMAT_VERSION, Home
from tests.bound import bound_by_permissions

OPEN = "import sys; from storage.home import Home; print(Home.open(sys.argv[1]).path)"
READ = """
import sys
from storage.errors import StorageError
from storage.home import Home
try:
    Home.open(sys.argv[1], create=False)
except StorageError as error:
    print(error)
"""


def test_everything_lies_in_the_home(home: Home) -> None:
    places = [
        Path(home.traces),
        home.policies,
        home.evaluations,
        home.figures,
        home.catalog,
        home.prefect,
        home.mlflow_db,
        home.mlflow_artifacts,
    ]
    assert all(place.is_relative_to(home.path) for place in places)
    assert len(set(places)) == len(places)
    assert home.mlflow_tracking_uri == f"sqlite:///{home.mlflow_db}"
    assert sorted(path.name for path in home.path.iterdir()) == ["home.json"]


def test_a_home_opens_again_and_a_relative_path_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Home.open("state") == Home.open(tmp_path / "state", create=False)


@pytest.mark.parametrize("content", ["{", "[]", "{}", "null"])
def test_a_damaged_marker_is_one_line(home: Home, content: str) -> None:
    (home.path / "home.json").write_text(content)
    with pytest.raises(StorageError, match="damaged") as caught:
        Home.open(home.path)
    assert "\n" not in str(caught.value)


def test_another_version_is_refused(home: Home) -> None:
    (home.path / "home.json").write_text(json.dumps({"format_version": FORMAT_VERSION + 1}))
    with pytest.raises(StorageError, match=f"format version {FORMAT_VERSION + 1}, expected {FORMAT_VERSION}"):
        Home.open(home.path)


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in ("file", "file/below"):
        with pytest.raises(StorageError, match="another --home"):
            Home.open(tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(StorageError, match="cannot make a home"):
        Home.open("/proc/kvp-home")


@pytest.mark.parametrize("name", ["home", "home/home.json"])
def test_a_home_that_may_not_be_read_is_one_line(home: Home, name: str) -> None:
    locked = home.path.parent / name
    mode = locked.stat().st_mode
    locked.chmod(0)
    try:
        done = subprocess.run(
            [*bound_by_permissions(), sys.executable, "-c", READ, str(home.path)],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        locked.chmod(mode)
    assert done.stdout.count("\n") == 1, done.stderr
    assert "cannot" in done.stdout and "Permission denied" in done.stdout and "home" in done.stdout


def test_a_missing_home_is_not_made_by_readers(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no home at"):
        Home.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_several_processes_may_make_one_home(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path / "home")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == [str(tmp_path / "home")] * 4
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["home.json"]


def test_importing_it_costs_nothing_heavy() -> None:
    code = "import sys, storage.home; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pyarrow", "lance", "zarr", "mlflow", "torch", "numpy", "pandas"} & set(done.stdout.split())


def test_places_in_a_home_are_noted_from_there_and_others_as_they_are(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home")
    for place, noted in {
        str(home.policies / "p"): "policies/p",
        str(home.traces): "traces",
        "": "",
        "file:///elsewhere/model": "file:///elsewhere/model",
        "s3://bucket/traces": "s3://bucket/traces",
    }.items():
        assert home.to_uri(place) == noted
        assert home.from_uri(noted) == place
    assert home.from_uri(home.to_uri("/elsewhere")) == "/elsewhere"
