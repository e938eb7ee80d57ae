"""Comparing training objectives, policy gradient against supervised surrogates, by the held-out cost that they reach.

Losses of different objectives have different scales, so the one thing compared is the normalised eviction cost of the
rankings, on the same held-out traces and the same KV heads. Heads are the sample: an interval says how far the mean
over heads would move with other heads of this model and, where there are several, with other training seeds. It says
nothing of other models or prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpolicy.errors import InputError
from kvpolicy.results.statistics import Bootstrap, Interval


@dataclass(frozen=True, kw_only=True)
class ObjectiveOutcome:
    """What one training came to.

    Attributes:
        objective: That it minimised.
        seed: Of weights, order and draws.
        heldout_cost: Normalised eviction cost of each head; the same heads in every outcome.
        train_s: Seconds of its steps, without held-out measurements.
    """

    objective: str
    seed: int
    heldout_cost: tuple[float, ...]
    train_s: float


@dataclass(frozen=True, kw_only=True)
class ObjectiveRow:
    """One line of the comparison.

    Attributes:
        objective: Name of the objective.
        cost: Mean held-out cost over heads and seeds.
        difference: This cost minus that of the reference, head by head and seed by seed.
        heads_better: Share of the heads whose mean over seeds is below that of the reference.
        num_seeds: Trainings.
        train_s: Mean seconds of a training.
    """

    objective: str
    cost: Interval
    difference: Interval
    heads_better: float
    num_seeds: int
    train_s: float


def compare_objectives(
    outcomes: Sequence[ObjectiveOutcome], bootstrap: Bootstrap, *, reference: str = "exact"
) -> tuple[ObjectiveRow, ...]:
    """Compare objectives by held-out cost, paired by head and by training seed.

    Args:
        outcomes: Of every objective, with the same heads and the same seeds.
        bootstrap: The bootstrap over heads and seeds.
        reference: What the others are compared with.

    Returns:
        A row for each objective, the lowest cost first.

    Raises:
        InputError: If the reference is missing, or outcomes differ in their heads or seeds.
    """
    by_pair = {(outcome.objective, outcome.seed): outcome for outcome in outcomes}
    names = list(dict.fromkeys(outcome.objective for outcome in outcomes))
    seeds = sorted({outcome.seed for outcome in outcomes})
    _check_outcomes(outcomes, names, seeds, reference)
    costs = np.array([[by_pair[name, one].heldout_cost for name in names] for one in seeds])  # seed, objective, head
    values = costs.transpose(2, 0, 1).reshape(costs.shape[2], -1)
    columns = np.arange(len(seeds) * len(names)).reshape(len(seeds), len(names))
    # One group: all objectives meet the same draws of seeds, as a difference between them must.
    averaged = bootstrap.average_units(bootstrap.resample(values), {"objectives": columns})
    differences = averaged.differences(np.arange(len(names)), np.full(len(names), names.index(reference)))
    of_heads = costs.mean(axis=0)
    rows = [
        ObjectiveRow(
            objective=name,
            cost=cost,
            difference=difference,
            heads_better=float((of_heads[index] < of_heads[names.index(reference)]).mean()),
            num_seeds=len(seeds),
            train_s=float(np.mean([by_pair[name, one].train_s for one in seeds])),
        )
        for index, (name, cost, difference) in enumerate(
            zip(names, averaged.intervals(), differences.intervals(), strict=True)
        )
    ]
    return tuple(sorted(rows, key=lambda row: row.cost.mean))


def _check_outcomes(
    outcomes: Sequence[ObjectiveOutcome], names: Sequence[str], seeds: Sequence[int], reference: str
) -> None:
    if reference not in names:
        raise InputError(f"objectives: no outcome of {reference}, which the others are compared with: train it as well")
    named = [(outcome.objective, outcome.seed) for outcome in outcomes]
    if len(set(named)) < len(named) or len(named) != len(names) * len(seeds):
        raise InputError(
            f"objectives: {len(named)} outcomes of {len(names)} objectives and {len(seeds)} seeds, expected one of "
            "each objective with each seed"
        )
    lengths = {len(outcome.heldout_cost) for outcome in outcomes}
    if len(lengths) > 1:
        raise InputError(f"objectives: outcomes have {sorted(lengths)} heads, expected the same heads in all")
