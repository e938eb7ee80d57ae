"""What MLflow's tables tell without MLflow, before anything runs: whether something was deleted there, or is lost.

Importing MLflow takes seconds, and its client makes the database that it asks; this reads one row and makes nothing.
"""

from __future__ import annotations

from typing import Any

from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.client import one_line_errors

_DELETED = "deleted"


def has_run(home: Home, run_id: str) -> bool:
    """Return whether MLflow has a run; one that was deleted in its pages is there until `mlflow gc` removes it.

    Raises:
        StorageError: if the database cannot be read.
    """
    return _scalar(home, "runs", "SELECT count(*) FROM runs WHERE run_uuid = :key", run_id) not in (None, 0)


def require_experiment(home: Home, name: str) -> None:
    """Refuse an experiment that was deleted in MLflow's pages: it takes no runs, and its name is taken.

    Raises:
        StorageError: if it was deleted, or the database cannot be read.
    """
    query = f"SELECT experiment_id FROM experiments WHERE name = :key AND lifecycle_stage = '{_DELETED}'"
    deleted = _scalar(home, "experiments", query, name)
    if deleted is not None:
        restore = f"mlflow experiments restore --experiment-id {deleted}"
        raise StorageError(
            f"MLflow's experiment {name!r} was deleted: restore it with "
            f"`MLFLOW_TRACKING_URI={home.mlflow_tracking_uri} {restore}`"
        )


def _scalar(home: Home, table: str, query: str, key: str) -> Any:
    """The one value that a query asks for; None where there is none, or no table yet."""
    if not (home.mlflow_place or home.mlflow_db.exists()):
        return None
    from sqlalchemy import create_engine, inspect, text
    from sqlalchemy.pool import NullPool

    with (
        one_line_errors("MLflow's database cannot be read"),
        create_engine(home.mlflow_tracking_uri, poolclass=NullPool).connect() as connection,
    ):
        if not inspect(connection).has_table(table):
            return None
        return connection.scalar(text(query), {"key": key})
