"""Section: wins of every method over every other by budget, with their confidence."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import plotly.graph_objects as go

from dashboards.figures.drawing import COLOUR_BAR, DIVERGING, Figure, cell, new_grid
from dashboards.figures.styles import in_order, short_metric
from dashboards.grouping import Place, Row, grouped, place_of
from dashboards.rendering.formats import NOTHING
from dashboards.rendering.table import Table, table
from dashboards.report.claims import ordered_metrics
from dashboards.report.document import MARKS, MARKS_NOTE, Block, missing, prose
from dashboards.report.view import ReportView, section, short
from dashboards.report.wins import REMEDY
from kvpolicy.results.comparisons import BETTER, UNDECIDED

_COLUMNS = 3
_MARKS = {verdict: mark for verdict, mark in MARKS.items() if verdict != UNDECIDED}


@section("matrix", "Who beats whom")
def matrix_section(view: ReportView) -> Iterator[Block]:
    """A matrix of methods at each budget, by the metric that leads."""
    if not view.rows.comparisons:
        yield missing("paired differences between all methods", REMEDY)
        return
    yield prose(
        "Each cell compares the method of its row with that of its column on the same samples. The confidence is the "
        "share of bootstrap resamples in which the row's method is better: 0.5 where nothing is known, 1 minus that of "
        "the mirrored cell. A mark stands where the interval of the difference excludes 0."
    )
    contests = grouped((row for row in view.rows.comparisons if row["is_contest"]), place_of)
    for place in view.places:
        by_metric = grouped(contests.get(place, []), itemgetter("metric"))
        if metrics := ordered_metrics(by_metric):
            yield _picture(place, metrics[0], by_metric[metrics[0]])
        else:
            remedy = "Evaluate several with `kvp evaluate --methods`."
            yield missing(f"two methods that compete ({short(place)})", remedy)


def _picture(place: Place, metric: str, rows: Sequence[Row]) -> Figure:
    methods = in_order(row["method"] for row in rows)
    budgets = sorted({row["budget"] for row in rows})
    cells = {(row["budget"], row["method"], row["other"]): row for row in rows}
    title = f"Who beats whom: {short(place)}, {short_metric(metric)}"
    won = {method: sum(row["verdict"] == BETTER for row in rows if row["method"] == method) for method in methods}
    least = min((row["n"] for row in rows), default=0)
    return Figure(
        drawing=draw_matrices(methods, budgets, cells),
        height=_height(methods, budgets),
        title=title,
        note=f"One matrix a budget. Colour: the confidence that the row's method is better; {MARKS_NOTE}. {least} "
        "samples or more, mean over tasks.",
        label=f"{title}. One matrix a budget. Of {len(budgets) * (len(methods) - 1)} comparisons each, won: "
        + ", ".join(f"{method} {count}" for method, count in won.items())
        + ". The confidences are in the tables below.",
        tables=tuple(_table(title, methods, budget, cells) for budget in budgets),
    )


def _height(methods: Sequence[str], budgets: Sequence[int]) -> int:
    return 110 + -(-len(budgets) // _COLUMNS) * (110 + 20 * len(methods))


def draw_matrices(
    methods: Sequence[str], budgets: Sequence[int], cells: Mapping[tuple[int, str, str], Row]
) -> go.Figure:
    """Methods by methods, one matrix a budget: confidence as colour, and a mark where the verdict is certain."""
    columns = min(_COLUMNS, len(budgets))
    titles = [f"{budget} tokens" for budget in budgets]
    bar = COLOUR_BAR | {"title": {"text": "confidence"}}
    drawing = new_grid(
        titles,
        columns=columns,
        gap_pixels=120,
        height=_height(methods, budgets),
        coloraxis={"colorscale": DIVERGING, "reversescale": True, "cmin": 0, "cmax": 1, "colorbar": bar},
        plot_bgcolor="#BDBDBD",
    )
    for place, budget in enumerate(budgets):
        grid = [[cells.get((budget, method, other)) for other in methods] for method in methods]
        drawing.add_heatmap(
            x=list(methods),
            y=list(methods),
            z=[[None if row is None else row["confidence"] for row in line] for line in grid],
            text=[["" if row is None else _MARKS.get(row["verdict"], "") for row in line] for line in grid],
            texttemplate="%{text}",
            hovertemplate="%{y} against %{x}: %{z:.3f}<extra></extra>",
            coloraxis="coloraxis",
            **cell(place, columns),
        )
    drawing.update_xaxes(tickangle=-90, showgrid=False)
    return drawing.update_yaxes(autorange="reversed", showgrid=False)


def _table(title: str, methods: Sequence[str], budget: int, cells: Mapping[tuple[int, str, str], Row]) -> Table:
    def words(method: str, other: str) -> str:
        row = cells.get((budget, method, other))
        return NOTHING if row is None else f"{MARKS[row['verdict']]} {row['confidence']:.3f}"

    return table(
        f"{title}, {budget} tokens",
        ("", *methods),
        [(method, *(words(method, other) for other in methods)) for method in methods],
        note=f"Confidence that the method of the row is better than that of the column. {MARKS_NOTE}.",
    )
