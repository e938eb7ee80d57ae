"""Budget curves: the lines of a panel with their bands, alone or beside others, its points as a table, and a web page.

The page needs nothing else: plotly.js and every point are inside it. It holds one *view* for each panel and shows one
at a time; the menus offer only what exists. A method that is hidden in the legend stays hidden when another view is
chosen.
"""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboards.figures.drawing import cell, linear_axis, log_axis, new_drawing, new_grid
from dashboards.figures.series import (
    Panel,
    Point,
    band_note,
    direction,
    split_full,
    task_label,
    value_axis,
    value_label,
)
from dashboards.figures.styles import method_order, metric_label, setting_label, style_of
from dashboards.rendering.formats import NOTHING, number, samples, with_interval
from dashboards.rendering.pages import render_template
from dashboards.rendering.table import Table, table
from kvpolicy.names import LEARNED

_COLUMNS = 3
_MENUS = {"benchmark": "Benchmark", "setting": "Setting", "metric": "Metric", "task": "Task"}


def draw_panel(panel: Panel, *, log_budget: bool = True) -> go.Figure:
    """One panel.

    Args:
        panel: what is drawn.
        log_budget: whether the budget's axis is logarithmic.
    """
    view = f"{panel.benchmark}/{panel.setting}/{panel.metric}/{panel.task}"
    # Hidden methods stay hidden from view to view; the axes are each view's own.
    drawing = new_drawing(uirevision="methods", xaxis={"uirevision": view}, yaxis={"uirevision": view})
    _add_panel(drawing, panel, log_budget=log_budget)
    return drawing


def draw_panels(panels: Sequence[Panel], titles: Sequence[str], *, height: int) -> go.Figure:
    """Several panels beside each other, each with a scale of its own; the legend names each method once."""
    columns = min(_COLUMNS, len(panels))
    drawing = new_grid(titles, columns=columns, gap_pixels=110, height=height, legend_below=True)
    seen: set[str] = set()
    for place, panel in enumerate(panels):
        _add_panel(drawing, panel, seen=seen, log_budget=True, **cell(place, columns))
    return drawing.update_yaxes(title={"standoff": 4, "font": {"size": 11}})


def _add_panel(
    drawing: go.Figure, panel: Panel, *, log_budget: bool, seen: set[str] | None = None, **place: int
) -> None:
    axis, named = value_axis(panel), set() if seen is None else seen
    where = "".join(f"{number}-" for number in place.values())
    for series in reversed(panel.series):  # the learned policy last: on top
        method, points = series.method, series.points
        budgets = [point.budget for point in points]
        lows, values, highs = (
            [max(getattr(point, end), axis.bottom) for point in points] for end in ("low", "value", "high")
        )
        drawing.add_trace(band(method, budgets, lows, highs, uid=f"band-{where}{method}"), **place)
        trace = line(
            method,
            budgets,
            values,
            uid=f"line-{where}{method}",
            showlegend=method not in named,
            customdata=[[p.value, p.low, p.high, p.num_samples, p.num_seeds] for p in points],
            hovertemplate="budget %{x}: %{customdata[0]:.3g} [%{customdata[1]:.3g}, %{customdata[2]:.3g}]<br>"
            "%{customdata[3]} samples, %{customdata[4]} seed(s)",
        )
        drawing.add_trace(trace, **place)
        named.add(method)
    drawing.update_xaxes(budget_axis(panel.budgets, log_budget=log_budget), **place)
    label = value_label(panel.metric, axis.floor, "<br>")
    values = [max(axis.bottom, point.value) for series in panel.series for point in series.points]
    drawing.update_yaxes(log_axis(label, values) if panel.is_log else linear_axis(label), **place)


def budget_axis(
    budgets: Sequence[int], *, log_budget: bool = True, title: str = "budget (tokens kept per KV head)"
) -> dict[str, Any]:
    """The axis of budgets, with a tick at each of them."""
    return {
        "type": "log" if log_budget else "linear",
        "title": {"text": title},
        "tickvals": list(budgets),
        "ticktext": [str(budget) for budget in budgets],
    }


def line(method: str, budgets: Sequence[int], values: Sequence[float], **more: Any) -> go.Scatter:
    """A method's line with its marks; `more` is plotly's."""
    style = style_of(method)
    return go.Scatter(
        name=method,
        legendgroup=method,
        legendrank=method_order(method)[0],
        mode="lines+markers" if style.marker else "lines",
        x=budgets,
        y=values,
        line={"color": style.colour, "dash": style.dash, "width": 1.3 * style.width},
        marker={"symbol": style.symbol, "size": 9 if method == LEARNED else 7},
        **more,
    )


def band(method: str, budgets: Sequence[int], lows: Sequence[float], highs: Sequence[float], *, uid: str) -> go.Scatter:
    """A method's intervals as a closed outline."""
    style = style_of(method)
    return go.Scatter(
        name=method,
        legendgroup=method,
        uid=uid,
        showlegend=False,
        hoverinfo="skip",
        mode="lines",
        fill="toself",
        x=[*budgets, *reversed(budgets)],
        y=[*lows, *reversed(highs)],
        line={"width": 0, "color": style.colour},
        fillcolor=f"rgba({','.join(str(int(style.colour[i : i + 2], 16)) for i in (1, 3, 5))},{style.band_alpha})",
    )


def points_table(panel: Panel, *, folded: bool = False) -> Table:
    """Every point of a panel: methods by budgets."""
    points = panel.points
    counts = samples(point.num_samples for point in points.values())
    exception = " A value alone has no interval: a task has one sample."
    if all(point.has_interval for point in points.values()):
        exception = ""
    return table(
        f"{panel.label}: {metric_label(panel.metric)}",
        ("method", *map(str, panel.budgets)),
        [(line.method, *(point_words(points.get((line.method, b))) for b in panel.budgets)) for line in panel.series],
        note=f"Value [interval] by budget; {direction(panel.metric)}; {counts}.{exception}",
        folded=folded,
    )


def point_words(point: Point | None) -> str:
    """The value of a point with its interval, where there is one."""
    if point is None:
        return NOTHING
    return with_interval(point.value, point.low, point.high) if point.has_interval else number(point.value)


def render_page(panels: Sequence[Panel], title: str) -> str:
    """The page as text; its views lie as JSON in the element `views`."""
    return render_template(
        "budget_curves.html",
        title=title,
        plotlyjs=get_plotlyjs(),
        menus=_MENUS,
        views=[_view(panel) for panel in panels],
    )


def _view(panel: Panel) -> dict[str, Any]:
    kept, full_note = split_full(panel)
    choice = {name: getattr(panel, name) for name in _MENUS}
    labels = (panel.benchmark, setting_label(panel.setting), metric_label(panel.metric), task_label(panel.task))
    notes = [direction(panel.metric), full_note, band_note([panel])]
    return {
        "choice": choice,
        "words": dict(zip(_MENUS, labels, strict=True)),
        "note": "; ".join(filter(None, notes)),
        "figure": draw_panel(kept).to_plotly_json(),
    }
