from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpolicy.digests import digest_bytes
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.lineage.artifacts import Artifact
from storage.openlineage import delivery as openlineage_delivery


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


@pytest.fixture
def catalog(home: Home) -> Catalog:
    return Catalog(home)


def artifact(kind: str, name: str, uri: str = "") -> Artifact:
    return Artifact(kind=kind, digest=digest_bytes(f"{kind} {name}".encode()), name=name, uri=uri)


def curve_row(curve_id: str, budget: int, value: float, **columns: object) -> dict[str, object]:
    return {
        "evaluation_id": "evaluation-1",
        "mlflow_run_id": "0123456789abcdef0123456789abcdef",
        "curve_id": curve_id,
        "model_id": "model-1",
        "model_digest": "digest",
        "policy_set_id": "",
        "method": "kvp",
        "benchmark": "ruler",
        "task": "mean",
        "setting": "query_agnostic",
        "metric": "kl",
        "budget": budget,
        "value": value,
        "n": 4,
        "seed": 0,
        **columns,
    }


@pytest.fixture(params=["folder", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a new trace store, of each kind."""
    if request.param == "folder":
        return str(tmp_path / "store")
    url: str = request.getfixturevalue("s3_url")
    return url


@pytest.fixture
def no_receiver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Neither the variables nor the configuration of whoever runs the tests; the client sets variables, too."""
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(openlineage_delivery, "_SILENCE", openlineage_delivery._Silence())
    yield
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE__TRANSPORT__TRANSPORTS__")]:
        del os.environ[name]
