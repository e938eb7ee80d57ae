"""MLflow's client on the database of a home: opened once a process, and its errors as one line.

Not for what is logged (`storage.mlflow.tracking`) or read of others' models (`storage.mlflow.registered_models`).
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpolicy.errors import first_line
from storage.database import require_postgresql, require_sqlite, sqlite_uri
from storage.errors import StorageError
from storage.home import Home

_REMEDY = "if mlflow/mlflow.db in the home was lost or damaged, restore it or use a new --home"


@functools.cache
def open_client(home: Home) -> Any:
    """Open MLflow's client, making the database if it is new.

    Raises:
        StorageError: if the database cannot be used.
    """
    # Set before the import that reads them: nothing is reported to anyone, and the first start is quiet.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        if home.mlflow_place:
            require_postgresql(home.mlflow_place)  # MLflow itself would try for minutes
        else:
            require_sqlite(home.mlflow_db)
        home.mlflow_artifacts.mkdir(parents=True, exist_ok=True)
        with (home.mlflow / ".setup.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two that make the tables at once break each other
            if not (home.mlflow_place or (home.mlflow_db.exists() and home.mlflow_db.stat().st_size)):
                _make_database(home.mlflow_db)
            _require_release(home.mlflow_tracking_uri)
            client = _opened(home.mlflow_tracking_uri)
    except OSError as error:
        raise StorageError(
            f"MLflow's folder {home.mlflow} cannot be used ({error.strerror or error}): make it writable, or use "
            "another --home"
        ) from error
    return client


def _opened(uri: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.search_experiments(max_results=1)  # makes tables that are not there
    return client


def _make_database(path: Path) -> None:
    """Make a database that appears only when it has all tables: MLflow does not go on with half of them."""
    draft = path.with_name(f".{path.name}-draft")
    for leftover in path.parent.glob(f"{draft.name}*"):  # of someone who was killed, and SQLite's journal of it
        leftover.unlink()
    _opened(sqlite_uri(draft))
    draft.rename(path)


def _require_release(uri: str) -> None:
    """Refuse tables of another release of MLflow.

    MLflow (3.17) says that those of a newer one are out of date, and migrates those of an older one without a word if
    it misses a table.
    """
    import mlflow.store.db_migrations
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError
    from sqlalchemy import create_engine, inspect, text
    from sqlalchemy.pool import NullPool

    with create_engine(uri, poolclass=NullPool).connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return  # a new database
        revision = connection.scalar(text("SELECT version_num FROM alembic_version"))
    revisions = ScriptDirectory(mlflow.store.db_migrations.__path__[0])
    expected = revisions.get_current_head()
    if revision in (None, expected):
        return
    try:
        revisions.get_revision(revision)
        whose, remedy = "an older release", f"copy it, then migrate it with `mlflow db upgrade {uri}`"
    except CommandError:
        whose, remedy = "a newer release", "use the release that made them, or another --home"
    raise StorageError(f"MLflow's tables in {uri} are of {whose} (revision {revision}, expected {expected}): {remedy}")


@contextmanager
def one_line_errors(what: str, remedy: str = _REMEDY) -> Iterator[None]:
    """Make any error of MLflow's a line that says what could not be done and what to do.

    Raises:
        StorageError: in the place of every other error.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # MlflowException, and SQLAlchemy's when the database is damaged or locked
        if "Current state is deleted" in str(error):  # while it was written to
            remedy = "restore it in MLflow, or run the same command again"
        raise StorageError(f"{what}: {first_line(error)}; {remedy}") from error
