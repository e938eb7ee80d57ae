"""Budget curves: the lines of a panel with their bands, alone or beside other panels."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from dashboards.drawing import cell, log_axis, new_drawing, new_grid
from dashboards.series import Panel, Series, ValueAxis, value_axis, value_label
from dashboards.styles import LEARNED, method_order, style_of

_COLUMNS = 3


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
    for line in reversed(panel.series):  # the learned policy last: on top
        drawing.add_trace(_band(line, axis).update(uid=f"band-{where}{line.method}"), **place)
        trace = _line(line, axis, is_named=line.method not in named)
        drawing.add_trace(trace.update(uid=f"line-{where}{line.method}"), **place)
        named.add(line.method)
    drawing.update_xaxes(budget_axis(panel.budgets, log_budget=log_budget), **place)
    label = value_label(panel.metric, axis.floor, "<br>")
    values = [max(axis.bottom, point.value) for line in panel.series for point in line.points]
    is_linear = {"type": "linear", "title": {"text": label}, "rangemode": "tozero"}
    drawing.update_yaxes(log_axis(label, values) if panel.is_log else is_linear, **place)


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


def _line(line: Series, axis: ValueAxis, *, is_named: bool) -> go.Scatter:
    style = style_of(line.method)
    return go.Scatter(
        name=line.method,
        legendgroup=line.method,
        legendrank=method_order(line.method)[0],
        showlegend=is_named,
        mode="lines+markers" if style.marker else "lines",
        x=[point.budget for point in line.points],
        y=[max(point.value, axis.bottom) for point in line.points],
        customdata=[[p.value, p.low, p.high, p.num_samples, p.num_seeds] for p in line.points],
        hovertemplate="budget %{x}: %{customdata[0]:.3g} [%{customdata[1]:.3g}, %{customdata[2]:.3g}]<br>"
        "%{customdata[3]} samples, %{customdata[4]} seed(s)",
        line={"color": style.colour, "dash": style.dash, "width": 1.3 * style.width},
        marker={"symbol": style.symbol, "size": 9 if line.method == LEARNED else 7},
    )


def _band(line: Series, axis: ValueAxis) -> go.Scatter:
    """The interval as a closed outline."""
    style = style_of(line.method)
    budgets = [point.budget for point in line.points]
    lows = [max(point.low, axis.bottom) for point in line.points]
    highs = [max(point.high, axis.bottom) for point in line.points]
    return go.Scatter(
        name=line.method,
        legendgroup=line.method,
        showlegend=False,
        hoverinfo="skip",
        mode="lines",
        fill="toself",
        x=budgets + budgets[::-1],
        y=lows + highs[::-1],
        line={"width": 0, "color": style.colour},
        fillcolor=transparent(style.colour, style.band_alpha),
    )


def transparent(colour: str, alpha: float) -> str:
    """A colour such as #D55E00 that lets through what is behind it."""
    return f"rgba({','.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))},{alpha})"
