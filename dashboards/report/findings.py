"""Section: are the best sets of different budgets nested, and does a score track the harm of leaving a token out?"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from plotly.colors import sample_colorscale

from dashboards.figures.curves import budget_axis
from dashboards.figures.drawing import (
    GREY,
    NAMES_AXIS,
    SEQUENTIAL,
    Figure,
    cell,
    error_bars,
    linear_axis,
    new_drawing,
    new_grid,
)
from dashboards.figures.styles import in_order, method_order, style_of
from dashboards.grouping import Place, Row, grouped, place_of
from dashboards.rendering.formats import NOTHING, samples, with_interval
from dashboards.rendering.table import Table, table
from dashboards.report.document import Block, missing, prose
from dashboards.report.view import ReportView, section, short

_NESTED = {
    "overlap": "share of the smaller set that both choices have",
    "excess_missed_mass": "future attention missed beyond the best set's (share)",
}
_ANALYSED = "`kvp evaluate --set evaluate.num_analysed=1` measures it on a sample of each task."
_HEIGHT = 420
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
Cells = Mapping[tuple[int, int], Row]


@section("findings", "Nestedness, and leaving one token out")
def findings_section(view: ReportView) -> Iterator[Block]:
    """Nestedness and leave-one-out, for each benchmark and setting."""
    nested = [row for row in view.rows.findings if row["analysis"] == "nestedness"]
    left_out = [row for row in view.rows.findings if row["analysis"] == "leave_one_out"]
    yield prose(
        "One ranking serves every budget only as far as the best sets are nested. For two budgets: keep the best "
        "entries of the larger one, recompute the future attention on what is left, keep the best of the smaller "
        "budget by that, and compare with the smaller budget's best set on the full cache. An overlap of 1 and an "
        "excess of 0 mean that one ranking loses nothing."
    )
    for place, rows in sorted(grouped(nested, place_of).items()):
        yield from _nestedness(place, rows)
    if not nested:
        yield missing("nestedness of the best sets", _ANALYSED)
    yield prose(
        "Does a score say how much a token matters? One token at a time is taken out of every head, and the divergence "
        "from the full cache is measured; the rank correlation of a method's scores with it is 1 where the scores "
        "order tokens by their harm, and 0 where they say nothing."
    )
    for place, rows in sorted(grouped(left_out, place_of).items()):
        yield _left_out(place, rows)
    if not left_out:
        yield missing("the harm of leaving single tokens out", _ANALYSED)


def _nestedness(place: Place, rows: Sequence[Row]) -> Iterator[Block]:
    by_method = grouped(rows, itemgetter("method"))
    for method in in_order(by_method):
        by_quantity = grouped(by_method[method], itemgetter("quantity"))
        cells_by_quantity = {
            quantity: {(row["budget"], row["larger_budget"]): row for row in by_quantity[quantity]}
            for quantity in _NESTED
            if quantity in by_quantity
        }
        if cells_by_quantity:
            yield _nested_picture(place, method, cells_by_quantity)


def _nested_picture(place: Place, method: str, cells_by_quantity: Mapping[str, Cells]) -> Figure:
    title = f"Are the best sets nested? {short(place)}, chosen by {method}"
    columns = len(cells_by_quantity)
    drawing = new_grid([_NESTED[name] for name in cells_by_quantity], columns=columns, gap_pixels=0, height=_HEIGHT)
    for panel, cells in enumerate(cells_by_quantity.values()):
        larger = sorted({pair[1] for pair in cells})
        shades = sample_colorscale(SEQUENTIAL, [line / max(1, len(larger) - 1) * 0.85 for line in range(len(larger))])
        for line, of in enumerate(larger):
            points = sorted((budget, row) for (budget, other), row in cells.items() if other == of)
            drawing.add_scatter(
                name=f"from {of} tokens",
                legendgroup=str(of),
                showlegend=panel == 0,
                x=[budget for budget, _ in points],
                y=[row["value"] for _, row in points],
                error_y=_bars([row for _, row in points]),
                mode="lines+markers",
                line={"color": shades[line]},
                marker={"symbol": _SYMBOLS[line % len(_SYMBOLS)], "size": 7},
                **cell(panel, columns),
            )
        axis = budget_axis(sorted({pair[0] for pair in cells}), title="smaller budget (tokens per KV head)")
        drawing.update_xaxes(axis, **cell(panel, columns))
    tables = tuple(_nested_table(place, method, quantity, cells) for quantity, cells in cells_by_quantity.items())
    return Figure(
        drawing=drawing,
        height=_HEIGHT,
        title=title,
        note="One line for each larger budget, whose cache was chosen from; bars: bootstrap intervals over samples.",
        label=f"{title}. Line charts against the smaller budget; all values are in the tables below.",
        tables=tables,
    )


def _nested_table(place: Place, method: str, quantity: str, cells: Cells) -> Table:
    budgets, larger = (sorted({pair[end] for pair in cells}) for end in (0, 1))
    return table(
        f"{short(place)}, {method}: {_NESTED[quantity]}",
        ("smaller budget", *(f"from {of} tokens" for of in larger)),
        [(str(budget), *(_cell(cells.get((budget, of))) for of in larger)) for budget in budgets],
        note=f"Value [interval]; {samples(row['n'] for row in cells.values())}.",
    )


def _left_out(place: Place, rows: Sequence[Row]) -> Figure:
    title = f"Does the score track the harm? {short(place)}"
    ordered = sorted(rows, key=lambda row: (method_order(row["method"]), row["seed"], row["budget"] or 0))
    drawing = new_drawing(
        showlegend=False,
        xaxis=linear_axis("rank correlation of scores with the divergence") | {"zerolinecolor": GREY},
        yaxis=NAMES_AXIS,
    )
    for row in ordered:
        style = style_of(row["method"])
        edge = {"color": style.colour, "width": 1}
        drawing.add_scatter(
            name=_name(row),
            x=[row["value"]],
            y=[_name(row)],
            error_x=_bars([row]),
            mode="markers",
            marker={"color": style.colour, "symbol": style.symbol, "size": 9, "line": edge},
        )
    numbers = table(
        title,
        ("method", "seed", "rank correlation [interval]", "samples"),
        [(row["method"], str(row["seed"]), _cell(row), str(row["n"])) for row in ordered],
        num_labels=2,
    )
    values = ", ".join(f"{_name(row)} {_cell(row)}" for row in ordered)
    return Figure(
        drawing=drawing,
        height=110 + 32 * len(ordered),
        title=title,
        note="One mark a method and seed; bars: bootstrap intervals over samples.",
        label=f"{title}. {values}.",
        tables=(numbers,),
    )


def _name(row: Row) -> str:
    return f"{row['method']}, seed {row['seed']}" if row["seed"] else str(row["method"])


def _cell(row: Row | None) -> str:
    return NOTHING if row is None else with_interval(row["value"], row["ci_low"], row["ci_high"])


def _bars(rows: Sequence[Row]) -> dict[str, Any]:
    return error_bars(*([row[name] for row in rows] for name in ("value", "ci_low", "ci_high")))
