"""What two pipeline runs are compared by, and what a refused one may leave."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from processes import Finished

from storage.catalog import Catalog
from storage.home import Home

PROGRESS = re.compile(r"\d\d:\d\d:\d\d (collect|train|evaluate): \d+/\d+ ")
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
