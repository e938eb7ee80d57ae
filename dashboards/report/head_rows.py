"""What the catalog has of each KV head of an evaluation: shape, held-out cost, and every method's cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dashboards.figures.heads import Heads
from dashboards.formats import is_number
from dashboards.report.claims import Row
from dashboards.report.view import Place, ReportView
from dashboards.styles import method_order

SHAPES = {
    "zipf_slope": "Zipf slope",
    "effective_tokens": "effective tokens",
    "rank_deviation": "rank deviation",
}


@dataclass(frozen=True, kw_only=True)
class Head:
    """One KV head: its shape, its cost on held-out traces, and each method's cost on the judged samples."""

    head: int
    name: str
    heldout_cost: float | None
    shape: Mapping[str, float | None]
    costs: Mapping[tuple[Place, str], float]


def read_heads(view: ReportView) -> list[Head]:
    """Every head, means over policy sets and over the seeds of a method."""
    trained: dict[int, list[Row]] = {}
    costs: dict[int, dict[tuple[Place, str], list[float]]] = {}
    names: dict[int, str] = {}
    for row in view.rows.heads:
        trained.setdefault(row["head"], []).append(row)
        names[row["head"]] = row["head_name"]
    for row in view.rows.head_costs:
        key = (place_of(row), row["method"])
        costs.setdefault(row["head"], {}).setdefault(key, []).append(row["cost"])
        names[row["head"]] = row["head_name"]
    heads = []
    for head, name in sorted(names.items()):
        rows = trained.get(head, [])
        heads.append(
            Head(
                head=head,
                name=name,
                heldout_cost=mean_of([row["heldout_cost"] for row in rows]),
                shape={shape: mean_of([row.get(shape) for row in rows]) for shape in SHAPES},
                costs={key: sum(values) / len(values) for key, values in costs.get(head, {}).items()},
            )
        )
    return heads


def places_of(heads: Sequence[Head]) -> Heads:
    """Where the heads lie on a map."""
    return Heads.of_rows([{"head": head.head, "head_name": head.name} for head in heads])


def method_costs(heads: Sequence[Head], place: Place) -> dict[str, np.ndarray]:
    """Method to its cost of each head in one place; NaN where a head has none."""
    methods = {method for head in heads for of_place, method in head.costs if of_place == place}
    return {
        method: np.array([head.costs.get((place, method), np.nan) for head in heads])
        for method in sorted(methods, key=method_order)
    }


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the numbers; None where there are none."""
    known = [value for value in values if value is not None and is_number(value)]
    return sum(known) / len(known) if known else None


def place_of(row: Row) -> Place:
    """Benchmark and setting of a row."""
    return row["benchmark"], row["setting"]
