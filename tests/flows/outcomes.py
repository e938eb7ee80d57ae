"""What two pipeline runs are compared by, and what one that was refused or killed may leave."""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from processes import Finished

from storage.catalog.catalog import Catalog
from storage.home import Home

PROGRESS = re.compile(r"\d\d:\d\d:\d\d ((collect|train|evaluate|analyse): \d+/\d+ |run: |model: |generate: )")
_NAME = ("method", "benchmark", "task", "setting", "metric", "budget", "seed")
_FIGURES = ("value", "ci_low", "ci_high", "n")
_HARMLESS_STAGES = {"prompts"}  # may well be kept: they are complete by themselves


def points(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Points of curves by name, without the ids that differ from home to home; none may be there twice."""
    rows = list(rows)
    found = {tuple(row[name] for name in _NAME): tuple(row[name] for name in _FIGURES) for row in rows}
    assert len(found) == len(rows)
    return found


def points_of_home(home: Path) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Points of the only evaluation of a home."""
    rows = catalog(home).rows("curves")
    assert len({row["evaluation_id"] for row in rows}) == 1
    return points(rows)


def policy_of_home(home: Path) -> str:
    """The only policy set of a home."""
    (found,) = {row["policy_set_id"] for row in catalog(home).rows("heads")}
    return str(found)


def mlflow_points(home: Path) -> Counter[tuple[Any, ...]]:
    """How many points MLflow has of each metric at each step, by name and state of their run."""
    query = "SELECT name, status, key, step FROM runs LEFT JOIN metrics USING (run_uuid)"
    return Counter(_rows(home / "mlflow" / "mlflow.db", query))


def stages_begun_again(home: Path) -> list[str]:
    """Stages that were begun once more after a run of theirs was committed, whether or not that came to an end.

    Every run tells of its start before it does anything, in a file that stays when it is killed.
    """
    begun = {}
    for file in home.glob("openlineage/*/*.jsonl"):
        start = json.loads(file.read_text().partition("\n")[0])
        begun[file.stem] = (start["run"]["facets"]["kvpolicy_stage"]["stageKey"], start["eventTime"])
    committed: dict[str, datetime] = {}
    for row in catalog(home).rows("runs", "outcome = 'completed'"):
        assert row["run_id"] in begun
        ended_at = row["ended_at"].replace(tzinfo=UTC)
        committed[row["stage_key"]] = min(ended_at, committed.get(row["stage_key"], ended_at))
    return [
        run_id
        for run_id, (key, time) in begun.items()
        if key in committed and datetime.fromisoformat(time) > committed[key]
    ]


def unfinished_in_prefect(home: Path) -> list[tuple[str, str, str]]:
    """Flow runs and task runs that Prefect's database in a home takes for going on: kind, name and state."""
    found = []
    for kind in ("flow_run", "task_run"):
        rows = _rows(home / "prefect" / "prefect.db", f"SELECT '{kind}', name, state_type FROM {kind}")
        assert rows
        found += [row for row in rows if row[2] in ("PENDING", "RUNNING", "CANCELLING")]
    return found


def _rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(query).fetchall()


def catalog(home: Path) -> Catalog:
    """The catalog of a home that is there."""
    return Catalog(Home.open(home, create=False))


def assert_refused(finished: Finished, *said: str) -> None:
    """A wrong input is one line on standard error, after nothing but progress, and a non-zero exit."""
    assert finished.code != 0
    assert finished.stdout == ""
    assert finished.stderr.endswith("\n")
    *before, last = finished.stderr.splitlines()
    assert last.startswith("kvp: ")
    assert [line for line in before if not PROGRESS.match(line)] == []
    assert "Traceback" not in finished.stderr
    for part in said:
        assert part in last


def assert_nothing_half_registered(home: Path) -> None:
    """No stage of the pipeline counts as done, and nothing of it is there."""
    if not home.is_dir():
        return
    completed = {row["stage"] for row in catalog(home).rows("runs", "outcome = 'completed'")}
    assert completed <= _HARMLESS_STAGES
    kinds = {row["kind"] for row in catalog(home).rows("artifacts")}
    assert kinds <= {"model", "prompts", "code", "environment", "request"}
    for table in ("curves", "heads", "scores", "samples"):
        assert catalog(home).rows(table) == []
