"""MLflow's database of a home: of another release, read-only, damaged, or half made by someone who was killed."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from storage.database import require_sqlite
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.tracking import Tracking
from tests.bound import bound_by_permissions

PREPARE = """
import sys
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.tracking import Tracking
try:
    Tracking(Home.open(sys.argv[1], create=False)).prepare()
except StorageError as error:
    print(error)
"""


@pytest.fixture
def home(mlflow_home: Home) -> Home:
    return mlflow_home


def refused(home: Home) -> str:
    with pytest.raises(StorageError) as caught:
        Tracking(home).prepare()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def revision(home: Home) -> str:
    with sqlite3.connect(home.mlflow_db) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def set_revision(home: Home, number: str) -> None:
    with sqlite3.connect(home.mlflow_db) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (number,))


def make_older(home: Home, back: int) -> str:
    """Make the database of an older release, by MLflow's own migrations up to then; returns its revision."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from mlflow.store import db_migrations
    from mlflow.store.tracking.dbmodels.initial_models import Base
    from sqlalchemy import create_engine

    home.mlflow_db.unlink()
    config = Config()
    config.set_main_option("script_location", db_migrations.__path__[0])
    config.set_main_option("sqlalchemy.url", home.mlflow_tracking_uri)
    number = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][back]
    engine = create_engine(home.mlflow_tracking_uri)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, number)
    engine.dispose()
    return number


@pytest.mark.parametrize("back", [1, 12])
def test_tables_of_an_older_release_are_left_as_they_are(home: Home, back: int) -> None:
    number = make_older(home, back)
    said = refused(home)
    assert f"{home.mlflow_tracking_uri} are of an older release (revision {number}, expected" in said
    assert f"`mlflow db upgrade {home.mlflow_tracking_uri}`" in said
    assert revision(home) == number


@pytest.mark.slow
def test_the_remedy_for_tables_of_an_older_release_works(home: Home) -> None:
    make_older(home, 12)
    remedy = refused(home).rpartition("`mlflow ")[2].rstrip("`").split()
    subprocess.run([sys.executable, "-m", "mlflow", *remedy], check=True, capture_output=True, timeout=120)
    Tracking(home).prepare()


def test_tables_of_a_newer_release_are_one_line(home: Home) -> None:
    set_revision(home, "ffffffffffff")
    assert "are of a newer release (revision ffffffffffff" in refused(home)
    with sqlite3.connect(home.mlflow_db) as connection:
        connection.execute("DROP TABLE spans")  # MLflow would begin to migrate
    assert "are of a newer release" in refused(home)


def test_what_is_no_database_is_one_line_at_once(home: Home) -> None:
    home.mlflow_db.write_bytes(b"junk" * 1000)
    assert f"{home.mlflow_db} cannot be read (file is not a database): restore it" in refused(home)
    home.mlflow_db.unlink()
    home.mlflow_db.mkdir()
    started = time.monotonic()
    assert f"{home.mlflow_db} cannot be read" in refused(home)
    assert time.monotonic() - started < 20  # MLflow itself tries for 100 s


def test_a_database_that_is_being_written_is_one(tmp_path: Path) -> None:
    path = tmp_path / "busy.db"
    require_sqlite(path)  # not there yet
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (a)")
        require_sqlite(path)
        connection.execute("BEGIN EXCLUSIVE")
        require_sqlite(path)


@pytest.mark.parametrize("name", ["mlflow.db", ""])
def test_a_database_that_cannot_be_written_is_one_line(home: Home, name: str) -> None:
    locked = home.mlflow / name if name else home.mlflow
    mode = locked.stat().st_mode
    locked.chmod(mode & ~0o222)
    command = [*bound_by_permissions(), sys.executable, "-c", PREPARE, str(home.path)]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    finally:
        locked.chmod(mode)
    assert done.stdout == (
        f"the database {home.mlflow_db} is read-only: make {locked} writable, or use another --home\n"
    )


@pytest.mark.parametrize(
    "after_s", [0.3, *(pytest.param(after_s, marks=pytest.mark.slow) for after_s in (0.0, 0.6, 0.9))]
)
def test_whoever_is_killed_while_making_the_tables_leaves_none(tmp_path: Path, after_s: float) -> None:
    home = Home.open(tmp_path / "home")
    process = subprocess.Popen([sys.executable, "-c", PREPARE, str(home.path)])
    deadline = time.monotonic() + 60
    while not list(home.mlflow.glob(".mlflow.db-draft")) and not home.mlflow_db.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(after_s)
    process.kill()
    process.wait()
    Tracking(home).prepare()
    assert sorted(path.name for path in home.mlflow.iterdir()) == [".setup.lock", "artifacts", "mlflow.db"]
