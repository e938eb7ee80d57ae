"""Section: what distinguishes KV heads, and what each method's ranking costs each of them."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dashboards.formats import NOTHING, is_number, number
from dashboards.report.document import Block, Section, missing, prose
from dashboards.report.head_figures import cost_boxes, cost_maps, pair_map, shape_maps
from dashboards.report.head_rows import SHAPES, Head, mean_of, method_costs, place_of, read_heads
from dashboards.report.view import Place, ReportView, short
from dashboards.styles import BOUNDS
from dashboards.tables import Table, table

SHAPES_NOTE = (
    "Zipf slope: importance falls as rank to minus this. Effective tokens: exp of the entropy of importance. Rank "
    "deviation: mean squared distance of the head's ranks (0 to 1) from the mean over heads."
)
_EXTREMES = 5


def heads_section(view: ReportView) -> Section:
    """Shape of importance, cost by head and method, agreement between heads, best and worst heads."""
    heads = read_heads(view)
    blocks: list[Block] = [
        prose(
            "Every KV head has a policy of its own. A head's cost is the importance that a ranking loses, summed over "
            "all budgets and divided by that of the best ranking: 1 is optimal. Costs of heads have no interval here, "
            "being means over the samples given; the spread shown is that between heads."
        )
    ]
    blocks += _shapes(heads)
    blocks += _costs(view, heads)
    blocks += _pairs(view, heads)
    blocks += _extremes(heads)
    return Section(anchor="heads", title="Head by head", blocks=tuple(blocks), origin=view.origin)


def _shapes(heads: Sequence[Head]) -> Iterator[Block]:
    there = [shape for shape in SHAPES if any(head.shape[shape] is not None for head in heads)]
    if not there:
        yield missing(
            "the shape of each head's importance", "`kvp train` of this release measures it on held-out traces."
        )
        return
    spread = mean_of([head.shape["rank_deviation"] for head in heads])
    if spread is not None:
        yield prose(
            f"Heads rank the same tokens differently: the variance of a token's rank (0 to 1) across heads is "
            f"{number(spread)} on average; it is 0 where all heads agree and 0.083 where each ranks at random."
        )
    yield shape_maps(heads, {shape: SHAPES[shape] for shape in there}, _heads_table(heads))


def _heads_table(heads: Sequence[Head]) -> Table:
    return table(
        "Every head on held-out traces",
        ("head", "held-out cost", *SHAPES.values()),
        [(head.name, number(head.heldout_cost), *(number(head.shape[s]) for s in SHAPES)) for head in heads],
        note=f"Means over the policy sets of this evaluation and over validation samples. {SHAPES_NOTE}",
    )


def _costs(view: ReportView, heads: Sequence[Head]) -> Iterator[Block]:
    if not view.rows.head_costs:
        yield missing("what each ranking costs each head", "`kvp evaluate` adds it to the table head_costs.")
        return
    for place in sorted({place_of(row) for row in view.rows.head_costs}):
        costs = method_costs(heads, place)
        summary = _cost_table(view, place, costs, [head.name for head in heads])
        yield cost_boxes(place, costs, summary)
        heuristics = [method for method in costs if method not in view.own and method not in BOUNDS]
        best = min(heuristics, key=lambda method: float(np.nanmean(costs[method])), default=None)
        shown = [
            method
            for method in (*[method_name for method_name in view.own if method_name in costs][:1], best)
            if method is not None
        ]
        if shown:
            yield cost_maps(place, heads, {method: costs[method] for method in shown})


def _cost_table(view: ReportView, place: Place, costs: Mapping[str, np.ndarray], names: Sequence[str]) -> Table:
    counts = sorted({row["n"] for row in view.rows.head_costs if place_of(row) == place})
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
        note=f"Over {len(next(iter(costs.values())))} heads, each a mean over {' to '.join(map(str, counts))} samples.",
    )


def _pairs(view: ReportView, heads: Sequence[Head]) -> Iterator[Block]:
    names = {head.head: head for head in heads}
    known = [row for row in view.rows.head_pairs if is_number(row["spearman"])]
    known = [row for row in known if row["head_a"] in names and row["head_b"] in names]
    if not known:
        yield missing(
            "rank correlations between heads", "`kvp train` of this release measures them on held-out traces."
        )
        return
    pairs: dict[tuple[int, int], list[float]] = {}
    for row in known:
        pairs.setdefault((row["head_a"], row["head_b"]), []).append(row["spearman"])
    means = {pair: sum(values) / len(values) for pair, values in pairs.items()}
    order = sorted(means, key=lambda pair: (-means[pair], pair))
    shown = dict.fromkeys([*order[:_EXTREMES], *order[-_EXTREMES:]])
    extremes = table(
        "The most and the least alike heads",
        ("head", "other head", "rank correlation"),
        [(names[a].name, names[b].name, number(means[a, b])) for a, b in shown],
        note="Of all pairs: SELECT * FROM head_pairs.",
        num_labels=2,
    )
    within = mean_of([value for (a, b), value in means.items() if names[a].layer == names[b].layer])
    across = mean_of([value for (a, b), value in means.items() if names[a].layer != names[b].layer])
    summary = table(
        "Rank correlation between heads, mean over pairs",
        ("pairs", "mean"),
        [("of one layer", number(within)), ("of different layers", number(across))],
    )
    yield pair_map(heads, means, (summary, extremes))


def _extremes(heads: Sequence[Head]) -> Iterator[Block]:
    known = sorted(
        (head for head in heads if head.heldout_cost is not None),
        key=lambda head: (head.heldout_cost or 0.0, head.head),
    )
    if not known:
        yield missing("held-out costs of heads", "`kvp train` adds them to the table heads.")
        return
    best, worst = known[:_EXTREMES], known[-_EXTREMES:][::-1]
    chosen = [("best", head) for head in best] + [("worst", head) for head in worst if head not in best]
    yield table(
        "Best and worst heads, by held-out cost",
        ("", "head", "held-out cost", *SHAPES.values()),
        [
            (what, head.name, number(head.heldout_cost), *(number(head.shape[shape]) for shape in SHAPES))
            for what, head in chosen
        ],
        note=f"Mean over the policy sets of this evaluation; 1 is optimal. {NOTHING}: not measured.",
        num_labels=2,
    )
