"""What the catalog has of each KV head of an evaluation: shape and held-out cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboards.figures.head_maps import Heads
from dashboards.rendering.formats import is_number
from dashboards.report.claims import Row
from dashboards.report.view import Place, ReportView

SHAPES = {
    "zipf_slope": "Zipf slope",
    "effective_tokens": "effective tokens",
    "rank_deviation": "rank deviation",
}


@dataclass(frozen=True, kw_only=True)
class Head:
    """One KV head: its shape, and its cost on held-out traces."""

    head: int
    name: str
    heldout_cost: float | None
    shape: Mapping[str, float | None]


def read_heads(view: ReportView) -> list[Head]:
    """Every head, means over policy sets."""
    trained: dict[int, list[Row]] = {}
    names: dict[int, str] = {}
    for row in view.rows.heads:
        trained.setdefault(row["head"], []).append(row)
        names[row["head"]] = row["head_name"]
    names |= {row["head"]: row["head_name"] for row in view.rows.head_costs}
    heads = []
    for head, name in sorted(names.items()):
        rows = trained.get(head, [])
        heads.append(
            Head(
                head=head,
                name=name,
                heldout_cost=mean_of([row["heldout_cost"] for row in rows]),
                shape={shape: mean_of([row.get(shape) for row in rows]) for shape in SHAPES},
            )
        )
    return heads


def places_of(heads: Sequence[Head]) -> Heads:
    """Where the heads lie on a map."""
    return Heads.of_rows([{"head": head.head, "head_name": head.name} for head in heads])


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of the numbers; None where there are none."""
    known = [value for value in values if value is not None and is_number(value)]
    return sum(known) / len(known) if known else None


def place_of(row: Row) -> Place:
    """Benchmark and setting of a row."""
    return row["benchmark"], row["setting"]
