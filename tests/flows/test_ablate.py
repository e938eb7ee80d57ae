"""`kvp ablate`: trainings that differ in nothing but objective and seed, compared, and each of them on record."""

import json
import shutil
from pathlib import Path

import pytest
from outcomes import assert_refused, catalog

ABLATE = ("--set", "ablate.objectives=['mse']", "--set", "ablate.num_seeds=2")


@pytest.fixture
def copy(small_run, tmp_path) -> Path:
    """A copy of the small run's home, with the traces to train on."""
    return shutil.copytree(small_run.home, tmp_path / "copy")


def test_objectives_are_compared_and_every_training_can_be_repeated(kvp_here, small_run, copy):
    finished = kvp_here("ablate", *small_run.options, *ABLATE, "--json", home=copy)
    assert finished.code == 0, finished.stderr
    rows = {row["objective"]: row for row in json.loads(finished.stdout)}
    assert set(rows) == {"exact", "mse"}
    trained = catalog(copy).sql("SELECT objective, seed, mean_heldout_cost, run_id FROM training_outcomes").to_pylist()
    assert {(row["objective"], row["seed"]) for row in trained} == {(name, seed) for name in rows for seed in (0, 1)}
    for name, row in rows.items():
        costs = [run["mean_heldout_cost"] for run in trained if run["objective"] == name]
        assert row["heldout_cost"] == pytest.approx(sum(costs) / 2)
        assert row["num_seeds"] == 2
        assert row["difference"] == pytest.approx(row["heldout_cost"] - rows["exact"]["heldout_cost"])
    assert kvp_here("stale", home=copy).stdout == "nothing is stale\n"
    repeated = next(run for run in trained if (run["objective"], run["seed"]) == ("mse", 1))
    finished = kvp_here("rerun", repeated["run_id"], "--json", home=copy)
    assert finished.code == 0, finished.stderr
    assert json.loads(finished.stdout)["identical"]


@pytest.mark.parametrize("setting", ["ablate.objectives=['guess']", "ablate.objectives=[]", "ablate.num_seeds=0"])
def test_what_cannot_be_compared_is_one_line(kvp_here, small_run, setting):
    finished = kvp_here("ablate", *small_run.options, "--set", setting, home=small_run.home)
    assert_refused(finished, "ablate", "objectives" if "objectives" in setting else "num_seeds")
