"""Section: who beats whom at which budget, with what confidence."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from dashboards.formats import NOTHING
from dashboards.report.claims import Row, ordered_metrics
from dashboards.report.document import MARKS, MARKS_NOTE, Block, Picture, Section, missing, prose
from dashboards.report.drawing import DIVERGING, colour_bar, heat_map, new_figure, to_png
from dashboards.report.view import Place, ReportView, short
from dashboards.report.wins import REMEDY
from dashboards.styles import method_order, short_metric
from dashboards.tables import Table, table

_COLUMNS = 3


def matrix_section(view: ReportView) -> Section:
    """A matrix of methods at each budget, by the metric that leads."""
    return Section(anchor="matrix", title="Who beats whom", blocks=tuple(_blocks(view)), origin=view.origin)


def _blocks(view: ReportView) -> Iterator[Block]:
    if not view.rows.comparisons:
        yield missing("paired differences between all methods", REMEDY)
        return
    yield prose(
        "Each cell compares the method of its row with that of its column on the same samples. The confidence is the "
        "share of bootstrap resamples in which the row's method is better: 0.5 where nothing is known, 1 minus that of "
        "the mirrored cell. A mark stands where the interval of the difference excludes 0."
    )
    for place in view.places:
        of_place = [
            row for row in view.rows.comparisons if (row["benchmark"], row["setting"]) == place and row["is_contest"]
        ]
        metrics = ordered_metrics({row["metric"] for row in of_place})
        if metrics:
            yield _picture(place, metrics[0], [row for row in of_place if row["metric"] == metrics[0]])
        else:
            yield missing(f"two methods that compete ({short(place)})", "Judge several with `kvp evaluate --methods`.")


def _picture(place: Place, metric: str, rows: Sequence[Row]) -> Picture:
    methods = sorted({row["method"] for row in rows}, key=method_order)
    budgets = sorted({row["budget"] for row in rows})
    cells = {(row["budget"], row["method"], row["other"]): row for row in rows}
    title = f"Who beats whom: {short(place)}, {short_metric(metric)}"
    won = {method: sum(row["verdict"] == "better" for row in rows if row["method"] == method) for method in methods}
    least = min((row["n"] for row in rows), default=0)
    return Picture(
        png=to_png(draw_matrices(methods, budgets, cells)),
        title=title,
        caption=f"One matrix a budget. Colour: the confidence that the row's method is better; {MARKS_NOTE}. {least} "
        "samples or more, mean over tasks.",
        alt=f"{title}. One matrix a budget. Of {len(budgets) * (len(methods) - 1)} comparisons each, won: "
        + ", ".join(f"{method} {count}" for method, count in won.items())
        + ". The confidences are in the tables below.",
        tables=tuple(_table(title, methods, budget, cells) for budget in budgets),
    )


def draw_matrices(methods: Sequence[str], budgets: Sequence[int], cells: Mapping[tuple[int, str, str], Row]) -> Figure:
    """Methods by methods, one matrix a budget: confidence as colour, and a mark where the verdict is certain."""
    columns = min(_COLUMNS, len(budgets))
    lines = -(-len(budgets) // columns)
    side = 0.24 * len(methods)
    figure = new_figure(columns * (side + 0.25) + 2.2, lines * (side + 0.4) + 1.2)
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for place, budget in enumerate(budgets):
        ax = axes.flat[place]
        grid = [[cells.get((budget, method, other)) for other in methods] for method in methods]
        shares = np.array([[np.nan if cell is None else cell["confidence"] for cell in line] for line in grid])
        image = heat_map(ax, shares, colours=DIVERGING, norm=Normalize(0, 1), rows=methods, columns=methods)
        for y, line in enumerate(grid):
            for x, cell in enumerate(line):
                if cell is not None and cell["verdict"] != "undecided":
                    ax.text(
                        x, y, MARKS[cell["verdict"]], ha="center", va="center", fontsize=8, color=_ink(shares[y, x])
                    )
        ax.set_title(f"{budget} tokens", fontsize=9.5)
        ax.tick_params(axis="x", rotation=90)
    for ax in axes.flat[len(budgets) :]:
        ax.set_axis_off()
    colour_bar(figure, image, list(axes.flat), "confidence")
    return figure


def _ink(share: float) -> str:
    return "white" if abs(share - 0.5) > 0.35 else "black"


def _table(title: str, methods: Sequence[str], budget: int, cells: Mapping[tuple[int, str, str], Row]) -> Table:
    def cell(method: str, other: str) -> str:
        row = cells.get((budget, method, other))
        return NOTHING if row is None else f"{MARKS[row['verdict']]} {row['confidence']:.3f}"

    return table(
        f"{title}, {budget} tokens",
        ("", *methods),
        [(method, *(cell(method, other) for other in methods)) for method in methods],
        note=f"Confidence that the method of the row is better than that of the column. {MARKS_NOTE}.",
    )
