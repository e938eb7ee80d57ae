"""Prefect and MLflow on a real PostgreSQL server, and databases that cannot be used."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from outcomes import assert_refused, catalog, points_of_home, policy_of_home
from processes import environment, last_line, run_command

from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.tracking import CurveRun, Tracking
from tests.postgresql import with_asyncpg

CURVE = CurveRun(
    experiment="an experiment",
    parent_run_id="",
    name="kvp",
    tags={"method": "kvp"},
    params={"seed": "0"},
    points=[("kl", 64, 0.5), ("kl", 128, 0.25)],
    timestamp_ms=1_700_000_000_000,
)
PREFECT_URL = "PREFECT_API_DATABASE_CONNECTION_URL"


def test_curves_and_the_place_of_mlflow_are_kept(postgresql, tmp_path):
    uri = postgresql.make_database("curves")
    home = Home.open(tmp_path / "home", mlflow=uri)
    run_id = Tracking(home).log_curve(CURVE)
    assert Tracking(home).log_curve(CURVE) == run_id
    points = MlflowClient(tracking_uri=home.mlflow_tracking_uri).get_metric_history(run_id, "kl")
    assert sorted((point.step, point.value) for point in points) == [(64, 0.5), (128, 0.25)]
    assert not home.mlflow_db.exists()
    assert Home.open(home.path) == Home.open(home.path, mlflow=uri) == home
    with pytest.raises(StorageError, match=r"keeps MLflow's runs in .*choose another --home"):
        Home.open(home.path, mlflow=postgresql.uri("another"))
    Home.open(tmp_path / "on-sqlite")
    with pytest.raises(StorageError, match=r"keeps MLflow's runs in sqlite:///.*choose another --home"):
        Home.open(tmp_path / "on-sqlite", mlflow=uri)


def test_a_database_that_cannot_be_used_is_one_line_and_makes_no_home(postgresql, tmp_path):
    read_only = postgresql.make_database("read_only")
    postgresql.run("ALTER DATABASE read_only SET default_transaction_read_only = on")
    postgresql.run("CREATE ROLE reader LOGIN")
    wrong = {
        "postgresql://kvp@127.0.0.1:9/none": "Connection refused",
        postgresql.uri("none"): 'database "none" does not exist',
        read_only: "is read-only",
        postgresql.uri("postgres", user="reader"): "no schema that this user may write",
        "postgresql://kvp:secret@127.0.0.1/kvp": "PGPASSWORD",
        "postgresql://kvp@127.0.0.1/kvp?password=secret": "PGPASSWORD",
        "mysql://kvp@127.0.0.1/kvp": "give postgresql://",
    }
    for uri, said in wrong.items():
        with pytest.raises(StorageError, match=said) as refused:
            Home.open(tmp_path / "home", mlflow=uri)
        assert "\n" not in str(refused.value) and "secret" not in str(refused.value)
    assert not (tmp_path / "home").exists()


def test_mlflow_s_database_of_another_release_is_one_line(postgresql, tmp_path):
    uri = postgresql.make_database("older")
    Tracking(Home.open(tmp_path / "first", mlflow=uri)).prepare()
    postgresql.run("UPDATE alembic_version SET version_num = '451aebb31d03'", database="older")
    with pytest.raises(StorageError, match=r"are of an older release \(revision 451aebb31d03.*mlflow db upgrade"):
        Tracking(Home.open(tmp_path / "second", mlflow=f"{uri}?application_name=second")).prepare()


def test_a_database_of_prefect_s_that_is_not_there_is_one_line(tmp_path):
    wrong = {
        "train": ("postgresql+asyncpg://kvp:secret@127.0.0.1:9/none", "Connection refused"),
        "up": ("mysql://kvp:secret@127.0.0.1/kvp", "give postgresql"),
    }
    for command, (url, said) in wrong.items():
        env = environment(**{PREFECT_URL: url})
        finished = run_command(["kvp", command, "--home", str(tmp_path / "home")], env=env, timeout_s=60)
        assert_refused(finished, said)
        assert "secret" not in finished.stderr


@pytest.mark.slow
def test_a_database_of_prefect_s_that_a_newer_release_made_is_one_line(postgresql, tmp_path):
    uri = postgresql.make_database("newer")
    postgresql.run(
        "CREATE TABLE alembic_version (version_num varchar(32)); INSERT INTO alembic_version VALUES ('ffffffffffff')",
        database="newer",
    )
    env = environment(**{PREFECT_URL: with_asyncpg(uri)})
    for command in ("train", "up"):
        finished = run_command(["kvp", command, "--home", str(tmp_path / "home")], env=env, timeout_s=180)
        assert_refused(finished, "Can't locate revision identified by 'ffffffffffff'", "server.log")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pipeline_with_all_state_that_can_be_on_postgresql(postgresql, smoke_run, tmp_path):
    mlflow_uri, prefect_uri = postgresql.make_database("mlflow"), postgresql.make_database("prefect")
    home = tmp_path / "home"
    env = environment(KVP_MLFLOW_URI=mlflow_uri, **{PREFECT_URL: with_asyncpg(prefect_uri)})
    command = ["kvp", "run", *smoke_run.options, "--home", str(home), "--json"]
    done = run_command(command, env=env, timeout_s=300)
    assert done.code == 0, last_line(done.stderr)
    document = json.loads(done.stdout)
    assert document["mlflow_tracking_uri"] == mlflow_uri.replace("://", "+psycopg2://")
    assert policy_of_home(home) == smoke_run.document["policy_set"]["id"]
    assert points_of_home(home) == points_of_home(smoke_run.home)

    logged = {run["mlflow_run_id"] for run in catalog(home).rows("curves")}
    kept = postgresql.run("SELECT run_uuid FROM runs WHERE status = 'FINISHED'", database="mlflow").split()
    assert logged and logged <= set(kept)
    states = postgresql.run("SELECT DISTINCT state_type FROM flow_run", database="prefect").split()
    assert states == ["COMPLETED"]
    assert [path for path in (home / "mlflow" / "mlflow.db", home / "prefect" / "prefect.db") if path.exists()] == []

    again = run_command(command, env={**env, "KVP_MLFLOW_URI": ""}, timeout_s=300)  # the home remembers it
    assert again.code == 0, last_line(again.stderr)
    assert all(stage["skipped"] for name, stage in json.loads(again.stdout)["stages"].items() if name != "prepare")
    assert sorted(postgresql.run("SELECT run_uuid FROM runs", database="mlflow").split()) == sorted(kept)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_services_with_all_state_that_can_be_on_postgresql(postgresql, tmp_path: Path):
    env = environment(
        KVP_MLFLOW_URI=postgresql.make_database("mlflow_of_services"),
        **{PREFECT_URL: with_asyncpg(postgresql.make_database("prefect_of_services"))},
    )
    options = ["--home", str(tmp_path / "home"), "--json"]
    try:
        up = run_command(["kvp", "up", *options], env=env, timeout_s=300)
        assert up.code == 0, last_line(up.stderr)
        assert {service["state"] for service in json.loads(up.stdout)["services"]} == {"running"}
        assert postgresql.run("SELECT count(*) FROM deployment", database="prefect_of_services") != "0"
    finally:
        down = run_command(["kvp", "down", *options], env=env, timeout_s=120)
    assert set(json.loads(down.stdout)["ended"]) == {"server", "mlflow", "worker"}
