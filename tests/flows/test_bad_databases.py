"""SQLite databases of a home that cannot be used: read-only, damaged, or of another release of Prefect or MLflow."""

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from outcomes import assert_refused
from processes import PROGRAMS, Finished, environment, last_line, run_command

from storage.home import Home
from storage.mlflow.tracking import Tracking
from tests.bound import bound_by_permissions

SETUP = "CREATE TABLE alembic_version (version_num varchar(32)); INSERT INTO alembic_version VALUES ('{}')"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home.open(tmp_path / "home")
    home.prefect.mkdir()
    return home


def kvp(*args: str, home: Home, bound: bool = False) -> Finished:
    """Runs `kvp` with a server of its own; `bound` by the permissions of files, also as root."""
    before = [str(shutil.which(part) or part) for part in bound_by_permissions()] if bound else []
    command = [*before, str(PROGRAMS / "kvp"), *args, "--home", str(home.path)]
    return run_command(command, env=environment(), timeout_s=180)


def set_up(database: Path, *, revision: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(SETUP.format(revision))


def revision_of(database: Path) -> str:
    with closing(sqlite3.connect(database)) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


@pytest.mark.parametrize("locked", ["prefect/prefect.db", "prefect", "locks"])
def test_what_prefect_cannot_write_is_one_line_before_anything_starts(home, locked):
    set_up(home.prefect / "prefect.db", revision="0" * 12)
    (home.path / "locks").mkdir()
    place = home.path / locked
    mode = place.stat().st_mode
    place.chmod(mode & ~0o222)
    try:
        assert_refused(kvp("train", home=home, bound=True), str(place))
        assert_refused(kvp("up", home=home, bound=True), str(place))
    finally:
        place.chmod(mode)
    logs = [*home.path.glob("*/server.log"), *home.path.glob("services/*.log")]
    assert [log for log in logs if log.read_bytes()] == [] and not home.mlflow.exists()


def test_a_database_of_prefect_s_that_is_none_is_one_line(home):
    (home.prefect / "prefect.db").write_bytes(b"junk" * 1000)
    for command in ("train", "up"):
        assert_refused(kvp(command, home=home), "prefect.db cannot be read (file is not a database)", "move it away")


def test_mlflow_s_tables_of_another_release_are_one_line_and_no_service_starts(home):
    Tracking(home).prepare()
    with closing(sqlite3.connect(home.mlflow_db)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        connection.commit()
    assert_refused(kvp("up", home=home), "are of a newer release (revision ffffffffffff", "--home")
    assert list(home.path.glob("services/*.log")) == []


@pytest.mark.slow
def test_a_database_of_prefect_s_that_a_newer_release_made_is_one_line(home):
    set_up(home.prefect / "prefect.db", revision="f" * 12)
    for command in ("train", "up"):
        said = kvp(command, home=home)
        assert_refused(said, "Can't locate revision identified by 'ffffffffffff'", "server.log")
    assert revision_of(home.prefect / "prefect.db") == "f" * 12


@pytest.mark.slow
def test_a_database_of_prefect_s_that_an_older_release_made_is_migrated(home, tmp_path):
    from prefect.server.database import _migrations

    scripts = sorted((Path(_migrations.__path__[0]) / "versions" / "sqlite").glob("*.py"))
    older = re.findall(r'^revision = "(\w+)"$', scripts[-4].read_text(encoding="utf-8"), re.MULTILINE)[0]
    command = ["prefect", "server", "database", "upgrade", "-y", "-r", older]
    done = run_command(command, env=environment(PREFECT_HOME=str(home.prefect)), timeout_s=180)
    assert done.code == 0, last_line(done.stderr)
    assert revision_of(home.prefect / "prefect.db") == older
    (tmp_path / "models").mkdir()
    looked = kvp("watch", "--source", f"folder:{tmp_path / 'models'}", home=home)
    assert (looked.code, looked.stdout) == (0, "nothing new\n"), last_line(looked.stderr)
    assert revision_of(home.prefect / "prefect.db") != older
