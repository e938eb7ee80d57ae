"""Homes whose path has signs that mean something in a URI, a pattern or a shell: all stores, and nothing outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvpolicy.names import CHAMPION
from storage.catalog.catalog import Catalog
from storage.database import require_sqlite, sqlite_path, sqlite_uri
from storage.errors import StorageError
from storage.home import Home
from storage.lineage.provenance import render_provenance
from storage.mlflow.registered_models import RegisteredModels
from storage.mlflow.tracking import POLICY_SET_TAG, CurveRun, DatasetRef, Tracking
from storage.tables.parquet import read_rows, write_rows
from storage.traces.places import Place
from storage.traces.store import TraceStore
from tests.storage.conftest import artifact
from tests.storage.trace_content import trace_sample, write

NAMES = ["a?b=c#d", "100% %2F%3f ;&+@:'\"", "[é]*{x}$HOME~漢\\n"]


@pytest.mark.parametrize("name", NAMES)
def test_every_store_keeps_to_a_home_of_any_name(tmp_path: Path, mlflow_database: Path, name: str) -> None:
    (tmp_path / "above").mkdir()
    home = Home.open(tmp_path / "above" / name)
    home.mlflow.mkdir()
    shutil.copy(mlflow_database, home.mlflow_db)

    prompts = home.prompts / "prompts.parquet"
    write_rows(prompts, [{"text": "a"}])
    assert read_rows(prompts) == [{"text": "a"}]
    store = TraceStore(home.traces)
    write(store, [trace_sample("s", 4)])
    assert (store.verify(), [row.sample_id for row in store.snapshot("c").rows]) == ([], ["s"])
    catalog = Catalog(home)
    with catalog.record_run(stage="s", stage_key="k", parameters={}, inputs={}, code_fingerprint="c") as run:
        made = run.output("prompts", artifact("prompts", "p", uri=str(prompts)))
    assert catalog.sql("SELECT count(*) AS n FROM runs").to_pylist() == [{"n": 1}]
    assert catalog.artifact(made).uri == str(prompts)
    (events,) = home.path.glob("openlineage/*/*.jsonl")
    assert (
        json.loads(events.read_text().splitlines()[-1])["outputs"][0]["facets"]["dataSource"]["uri"] == prompts.as_uri()
    )
    assert made in json.dumps(json.loads(render_provenance(catalog.lineage(made), "json")))

    tracking = Tracking(home)
    curve = CurveRun(
        experiment="e / 1",
        parent_run_id="",
        name="n",
        tags={},
        params={},
        points=[("kl", 64, 0.5)],
        timestamp_ms=1,
        datasets=[DatasetRef(name="prompts", digest="d", uri=str(prompts))],
    )
    run_id = tracking.log_curve(curve)
    tracking.log_artifact(run_id, prompts, "figures")
    tags = {POLICY_SET_TAG: "policy_set-1"}
    tracking.register_policy(name="m", folder=home.prompts, run_id=run_id, tags=tags, description="d")
    assert tracking.move_alias(CHAMPION, "policy_set-1")
    registry = RegisteredModels(home)
    version = registry.find("m", alias=CHAMPION)
    registry.fetch(version, prompts.name, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == prompts.read_bytes()

    moved = Home.open(shutil.move(home.path, tmp_path / "above" / f"{name}, moved"))
    assert registry.names(RegisteredModels(moved).find("m")) == [prompts.name]
    assert [path.name for path in (tmp_path / "above").iterdir()] == [moved.path.name]
    assert sorted(path.name for path in moved.path.iterdir()) == [
        "catalog",
        "home.json",
        "mlflow",
        "openlineage",
        "prompts",
        "traces",
    ]


@pytest.mark.parametrize("name", NAMES[:1])
def test_mlflow_s_database_is_made_in_the_home(tmp_path: Path, name: str) -> None:
    home = Home.open(tmp_path / name)
    Tracking(home).prepare()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert home.mlflow_db.stat().st_size > 0


@pytest.mark.parametrize("name", [*NAMES, "plain"])
def test_sqlalchemy_opens_the_file_that_a_uri_was_made_of(tmp_path: Path, name: str) -> None:
    from sqlalchemy import create_engine, text
    from sqlalchemy.pool import NullPool

    path = tmp_path / name / "x.db"
    path.parent.mkdir()
    for uri in (sqlite_uri(path), sqlite_uri(path, "pysqlite")):
        assert sqlite_path(uri) == path
        with create_engine(uri, poolclass=NullPool).begin() as connection:
            connection.execute(text("CREATE TABLE IF NOT EXISTS t (a)"))
        assert [found.name for found in path.parent.iterdir()] == ["x.db"]
    require_sqlite(path)


def test_a_home_that_no_uri_can_name_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not text in UTF-8: choose another --home"):
        Home.open(f"{tmp_path}/\udce9")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["s3://bucket/a?b", "s3://bucket/a#b", "s3://a?b"])
def test_what_a_url_does_not_take_for_its_path_is_no_prefix(url: str) -> None:
    with pytest.raises(StorageError, match=r"without \? and #"):
        Place.at(url)
