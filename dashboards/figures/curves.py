"""Budget curves: the lines of a panel with their bands, alone or beside other panels."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from dashboards.figures.drawing import cell, log_axis, new_drawing, new_grid
from dashboards.figures.series import Panel, value_axis, value_label
from dashboards.figures.styles import method_order, style_of
from kvpolicy.names import LEARNED

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
