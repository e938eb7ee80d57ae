"""Section: differences between KV heads, and the cost of each under each method."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

import numpy as np

from dashboards.figures.drawing import Figure
from dashboards.figures.head_maps import (
    SHAPES,
    HeadMap,
    Heads,
    cost_map,
    costs_by_method,
    draw_cost_boxes,
    draw_maps,
    linear_colours,
)
from dashboards.figures.pairs import Correlations, draw_matrix, means_table
from dashboards.grouping import Place, Row, grouped, place_of
from dashboards.rendering.formats import NOTHING, is_number, number, samples
from dashboards.rendering.table import Table, table
from dashboards.report.document import Block, missing, prose
from dashboards.report.view import ReportView, section, short
from kvpolicy.names import BOUNDS

SHAPES_NOTE = (
    "Zipf slope: importance falls as rank to minus this. Effective tokens: exp of the entropy of importance. Rank "
    "deviation: mean squared distance of the head's ranks (0 to 1) from the mean over heads."
)
_EXTREMES = 5


@dataclass(frozen=True, kw_only=True)
class Head:
    """One KV head: its shape, and its cost on held-out traces."""

    head: int
    name: str
    heldout_cost: float
    shape: Mapping[str, float]

    @property
    def cells(self) -> tuple[str, ...]:
        """Name, held-out cost and shape in a table."""
        return (self.name, number(self.heldout_cost), *map(number, self.shape.values()))


def read_heads(view: ReportView) -> list[Head]:
    """Every head, means over policy sets."""
    names = {row["head"]: row["head_name"] for row in (*view.rows.heads, *view.rows.head_costs)}
    trained = dict.fromkeys(names, ()) | grouped(view.rows.heads, itemgetter("head"))
    return [
        Head(
            head=head,
            name=name,
            heldout_cost=_mean(row["heldout_cost"] for row in trained[head]),
            shape={shape: _mean(row.get(shape) for row in trained[head]) for shape in SHAPES},
        )
        for head, name in sorted(names.items())
    ]


def places_of(heads: Sequence[Head]) -> Heads:
    """Where the heads lie on a map."""
    return Heads.of_rows([{"head": head.head, "head_name": head.name} for head in heads])


def _mean(values: Iterable[float | None]) -> float:
    """Mean of the numbers; NaN where there are none."""
    known = [value for value in values if value is not None and is_number(value)]
    return sum(known) / len(known) if known else math.nan


@section("heads", "Head by head")
def heads_section(view: ReportView) -> Iterator[Block]:
    """Shape of importance, cost by head and method, agreement between heads, best and worst heads."""
    heads = read_heads(view)
    yield prose(
        "Every KV head has a policy of its own. A head's cost is the importance that a ranking loses, summed over "
        "all budgets and divided by that of the best ranking: 1 is optimal. Costs of heads have no interval here, "
        "being means over the samples given; the spread shown is that between heads."
    )
    yield from _shapes(heads)
    yield from _costs(view, heads)
    yield from _pairs(view, heads)
    yield from _extremes(heads)


def _shapes(heads: Sequence[Head]) -> Iterator[Block]:
    there = [shape for shape in SHAPES if any(is_number(head.shape[shape]) for head in heads)]
    if not there:
        yield missing(
            "the shape of each head's importance", "`kvp train` of this release measures it on held-out traces."
        )
        return
    spread = _mean([head.shape["rank_deviation"] for head in heads])
    if is_number(spread):
        yield prose(
            f"Heads rank the same tokens differently: the variance of a token's rank (0 to 1) across heads is "
            f"{number(spread)} on average; it is 0 where all heads agree and 0.083 where each ranks at random."
        )
    yield _shape_maps(heads, there)


def _shape_maps(heads: Sequence[Head], shapes: Sequence[str]) -> Figure:
    """One map a figure of shape."""
    shape_values = {SHAPES[shape]: [head.shape[shape] for head in heads] for shape in shapes}
    ranges = "; ".join(
        f"{words} from {number(np.nanmin(values))} to {number(np.nanmax(values))}"
        for words, values in shape_values.items()
    )
    places = places_of(heads)
    return Figure(
        drawing=draw_maps(
            places,
            [
                HeadMap(title=words, values=values, texts=list(map(number, values)), colours=linear_colours(values))
                for words, values in shape_values.items()
            ],
        ),
        height=places.height * len(shape_values),
        title="Shape of the oracle's importance, head by head",
        note="A steep Zipf slope means that few tokens matter, so that eviction costs little; many effective tokens "
        "mean the opposite. A large rank deviation: the head ranks unlike the others. Layers from left to right, KV "
        "heads of a layer from top to bottom. Grey: no value.",
        label=f"Heat maps over layers and KV heads: {ranges}. The values are in the table below.",
        tables=(_heads_table(heads),),
    )


def _heads_table(heads: Sequence[Head]) -> Table:
    return table(
        "Every head on held-out traces",
        ("head", "held-out cost", *SHAPES.values()),
        [head.cells for head in heads],
        note=f"Means over the policy sets of this evaluation and over validation samples. {SHAPES_NOTE}",
    )


def _costs(view: ReportView, heads: Sequence[Head]) -> Iterator[Block]:
    if not view.rows.head_costs:
        yield missing("what each ranking costs each head", "`kvp evaluate` adds it to the table head_costs.")
        return
    for place, rows in sorted(grouped(view.rows.head_costs, place_of).items()):
        known = {m: of for m, of in costs_by_method(rows, places_of(heads)).items() if np.isfinite(of).any()}
        if not known:
            yield missing(f"a finite cost of any head ({short(place)})", "`kvp evaluate` of another model has some.")
            continue
        yield _cost_boxes(place, known, _cost_table(rows, place, known, [head.name for head in heads]))
        others = [method for method in known if method not in view.learned and method not in BOUNDS]
        others.sort(key=lambda method: float(np.nanmean(known[method])))
        if shown := [*[method for method in view.learned if method in known][:1], *others[:1]]:
            yield _cost_maps(place, heads, {method: known[method] for method in shown})


def _cost_maps(place: Place, heads: Sequence[Head], costs: Mapping[str, np.ndarray]) -> Figure:
    """The learned policy's cost of each head and the best other method's, in the same colours."""
    everything = np.concatenate(list(costs.values())).tolist()
    names = " and ".join(costs)
    rows = [(head.name, *(number(values[index]) for values in costs.values())) for index, head in enumerate(heads)]
    places = places_of(heads)
    return Figure(
        drawing=draw_maps(
            places,
            [cost_map(values.tolist(), title=f"{method}: cost", shared=everything) for method, values in costs.items()],
        ),
        height=places.height * len(costs),
        title=f"Cost of each head under {names}: {short(place)}",
        note="The same logarithmic colours in each map; 1 is optimal. The second method is the baseline with the "
        "lowest mean cost.",
        label="Heat maps of eviction cost over layers and KV heads: "
        + "; ".join(f"{name} from {number(np.nanmin(v))} to {number(np.nanmax(v))}" for name, v in costs.items())
        + ". The values are in the table below.",
        tables=(table(f"Cost of every head: {short(place)}", ("head", *costs), rows),),
    )


def _cost_boxes(place: Place, costs: Mapping[str, np.ndarray], numbers: Table) -> Figure:
    medians = ", ".join(f"{method} {number(float(np.nanmedian(values)))}" for method, values in costs.items())
    return Figure(
        drawing=draw_cost_boxes(costs),
        height=100 + 34 * len(costs),
        title=f"Cost of heads by method: {short(place)}",
        note="Box: middle half of the heads, with the median; line: 5 % to 95 %; dots: the heads outside.",
        label=f"Box plots of eviction cost over heads. Medians: {medians}. Quartiles are in the table below.",
        tables=(numbers,),
    )


def _cost_table(rows: Sequence[Row], place: Place, costs: Mapping[str, np.ndarray], names: Sequence[str]) -> Table:
    return table(
        f"Cost of a head by method: {short(place)}",
        ("method", "mean", "lower quartile", "median", "upper quartile", "worst head", "cost there"),
        [
            (
                method,
                number(float(np.nanmean(values))),
                *(number(float(end)) for end in np.nanquantile(values, (0.25, 0.5, 0.75))),
                names[int(np.nanargmax(values))],
                number(float(np.nanmax(values))),
            )
            for method, values in costs.items()
        ],
        note=f"Over {len(next(iter(costs.values())))} heads, each a mean over {samples([row['n'] for row in rows])}.",
    )


def _pairs(view: ReportView, heads: Sequence[Head]) -> Iterator[Block]:
    known = [row for row in view.rows.head_pairs if is_number(row["spearman"])]
    if not known:
        yield missing(
            "rank correlations between heads", "`kvp train` of this release measures them on held-out traces."
        )
        return
    correlations = Correlations.of_rows(known, {head.head: head.name for head in heads})
    names, means = correlations.names, correlations.matrix
    order = sorted({(row["head_a"], row["head_b"]) for row in known}, key=lambda pair: (-means[pair], pair))
    shown = dict.fromkeys([*order[:_EXTREMES], *order[-_EXTREMES:]])
    extremes = table(
        "The most and the least alike heads",
        ("head", "other head", "rank correlation"),
        [(names[a], names[b], number(float(means[a, b]))) for a, b in shown],
        note="Of all pairs: SELECT * FROM head_pairs.",
        num_labels=2,
    )
    matrix = draw_matrix(correlations)
    words = (
        "Spearman's rank correlation of importance; at 1 two heads rank all tokens alike: one policy would do for both."
    )
    yield replace(matrix, note=f"{words} {matrix.note}", tables=(means_table(correlations), extremes))


def _extremes(heads: Sequence[Head]) -> Iterator[Block]:
    known = sorted((head for head in heads if is_number(head.heldout_cost)), key=attrgetter("heldout_cost", "head"))
    if not known:
        yield missing("held-out costs of heads", "`kvp train` adds them to the table heads.")
        return
    best, worst = known[:_EXTREMES], known[-_EXTREMES:][::-1]
    chosen = [("best", head) for head in best] + [("worst", head) for head in worst if head not in best]
    yield table(
        "Best and worst heads, by held-out cost",
        ("", "head", "held-out cost", *SHAPES.values()),
        [(which, *head.cells) for which, head in chosen],
        note=f"Mean over the policy sets of this evaluation; 1 is optimal. {NOTHING}: not measured.",
        num_labels=2,
    )
