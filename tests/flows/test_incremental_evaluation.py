"""Evaluations that know a part of the contenders: what is evaluated again, and what stays as it was."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL_METHODS
from outcomes import catalog, points
from sources import copied_sources

NEW = "keydiff"
_SCORE = ("sample_id", "task", "setting", "method", "seed", "budget", "metric")


def evaluated(home: Path) -> Counter[str]:
    """How often the shards of each method were evaluated."""
    rows = catalog(home).rows("runs", where="stage = 'evaluate-shard' AND outcome = 'completed'")
    return Counter(json.loads(row["parameters_json"])["method"] for row in rows)


def scores(home: Path, evaluation_id: str) -> dict[tuple[Any, ...], float]:
    rows = catalog(home).rows("scores", where=f"evaluation_id = '{evaluation_id}'")
    return {tuple(row[name] for name in _SCORE): row["value"] for row in rows}


def evaluation_ids(home: Path) -> list[str]:
    return list(dict.fromkeys(row["evaluation_id"] for row in catalog(home).rows("curves")))


def options_with(options: tuple[str, ...], methods: str) -> list[str]:
    return [methods if option == SMALL_METHODS else option for option in options]


def test_a_method_that_is_added_is_evaluated_alone(kvp_here, small_run, tmp_path):
    home = shutil.copytree(small_run.home, tmp_path / "home")
    before, (first,) = evaluated(home), evaluation_ids(home)
    finished = kvp_here("evaluate", *options_with(small_run.options, f"{SMALL_METHODS},{NEW}"), home=home)
    assert finished.code == 0, finished.stderr
    again = evaluated(home) - before
    assert set(again) == {NEW}, again
    _, second = evaluation_ids(home)
    old, new = scores(home, first), scores(home, second)
    assert {key: new[key] for key in old} == old  # to the last digit
    assert {key[3] for key in new.keys() - old.keys()} == {NEW}
    of_first, of_second = (
        points(catalog(home).rows("curves", where=f"evaluation_id = '{name}'")) for name in (first, second)
    )
    assert {key: of_second[key] for key in of_first} == of_first


@pytest.mark.slow  # a pipeline in a process of its own
def test_a_method_that_changed_is_evaluated_alone(kvp, small_run, tmp_path):
    home = shutil.copytree(small_run.home, tmp_path / "home")
    before, (first,) = evaluated(home), evaluation_ids(home)
    sources = copied_sources(tmp_path)
    with (sources / "kvpolicy" / "methods" / "knorm.py").open("a") as stream:
        stream.write("CHANGED = 1\n")
    finished = kvp("evaluate", *small_run.options, home=home, PYTHONPATH=str(sources))
    assert finished.code == 0, finished.stderr
    again = evaluated(home) - before
    assert set(again) == {"knorm"}, again
    _, second = evaluation_ids(home)
    assert scores(home, second) == scores(home, first)
