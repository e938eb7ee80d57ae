"""Comparing objectives: means and differences by hand, intervals that contain them, and outcomes that do not fit."""

import numpy as np
import pytest

from kvpolicy.objectives.registry import OBJECTIVES
from kvpolicy.results.objectives import ObjectiveOutcome, compare_objectives
from kvpolicy.results.statistics import Bootstrap
from kvpolicy.training.ablation import AblateConfig


def _outcomes(objectives=("exact", "rloo", "mse"), seeds=(0, 1, 2), num_heads=40, shift=(0.0, 0.1, 0.5)):
    draws = np.random.default_rng(0)
    head = 1.2 + draws.random(num_heads)
    return [
        ObjectiveOutcome(
            objective=name,
            seed=seed,
            heldout_cost=tuple(head + shift[index] + 0.02 * draws.random(num_heads)),
            train_s=10.0 * (index + 1) + seed,
        )
        for index, name in enumerate(objectives)
        for seed in seeds
    ]


def test_rows_are_means_over_heads_and_seeds_the_best_first():
    outcomes = _outcomes()
    rows = compare_objectives(outcomes[::-1], Bootstrap(seed=0))
    assert [row.objective for row in rows] == ["exact", "rloo", "mse"]
    costs = {
        name: np.mean([o.heldout_cost for o in outcomes if o.objective == name]) for name in ("exact", "rloo", "mse")
    }
    for row, seconds in zip(rows, (11.0, 21.0, 31.0), strict=True):
        assert row.cost.mean == pytest.approx(costs[row.objective])
        assert row.difference.mean == pytest.approx(costs[row.objective] - costs["exact"])
        assert row.cost.low < row.cost.mean < row.cost.high
        assert (row.num_seeds, row.train_s) == (3, pytest.approx(seconds))
    assert (rows[0].difference.low, rows[0].difference.high, rows[0].heads_better) == (0.0, 0.0, 0.0)
    # Heads differ by far more than objectives do; paired by head, the difference is sure all the same.
    assert rows[1].difference.excludes_zero and rows[1].cost.low < rows[0].cost.high
    assert rows[1].heads_better == 0.0


def test_heads_better_is_the_share_below_the_reference():
    first = ObjectiveOutcome(objective="exact", seed=0, heldout_cost=(1.5, 1.5, 1.5, 1.5), train_s=1.0)
    second = ObjectiveOutcome(objective="mse", seed=0, heldout_cost=(1.4, 1.6, 1.5, 2.0), train_s=1.0)
    rows = {row.objective: row for row in compare_objectives([first, second], Bootstrap(seed=0))}
    assert rows["mse"].heads_better == 0.25


@pytest.mark.parametrize(
    ("outcomes", "named"),
    [
        (_outcomes(objectives=("rloo", "mse")), "no outcome of exact"),
        (_outcomes()[1:], "8 outcomes of 3 objectives and 3 seeds"),
        ([*_outcomes(), _outcomes()[0]], "10 outcomes"),
        ([*_outcomes(seeds=(0,)), *_outcomes(seeds=(1,), num_heads=3)], "[3, 40] heads"),
    ],
    ids=["no-reference", "one-missing", "one-twice", "other-heads"],
)
def test_outcomes_that_do_not_fit_are_refused(fails_in_one_line, outcomes, named):
    assert named in fails_in_one_line(compare_objectives, outcomes, Bootstrap(seed=0))


def test_objectives_are_checked_by_name(fails_in_one_line):
    def refused(*objectives: str) -> str:
        return fails_in_one_line(AblateConfig, objectives=objectives)

    assert AblateConfig(objectives=("mse", "exact")).compared == ("exact", "mse")
    assert "objectives is (), expected at least one" in refused()
    message = refused("reinforce", "exact", "ppo")
    assert all(part in message for part in ("'reinforce' is unknown", "'ppo' is unknown", "one of exact"))
    assert "expected no value twice" in refused("mse", "exact", "mse")
    assert "'ppo' is unknown" in fails_in_one_line(AblateConfig, reference="ppo")
    assert AblateConfig().compared == OBJECTIVES.own_names
