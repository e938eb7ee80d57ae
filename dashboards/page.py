"""Budget curves as one web page that needs nothing else: plotly.js and every point are inside it.

The page holds one *view* for each panel and shows one at a time; the menus offer only what exists. A method that is
hidden in the legend stays hidden when another view is chosen.
"""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboards.rendering import render_template
from dashboards.series import Panel, Series, ValueAxis, band_note, direction, split_full, value_axis, value_label
from dashboards.styles import LEARNED, metric_label, setting_label, style_of

_MENUS = {"benchmark": "Benchmark", "setting": "Setting", "metric": "Metric", "task": "Task"}


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
    words = {"setting": setting_label(panel.setting), "metric": metric_label(panel.metric)}
    if panel.task == "mean":
        words["task"] = "mean over tasks"
    notes = [direction(panel.metric), full_note, band_note([panel])]
    return {
        "choice": choice,
        "words": choice | words,
        "note": "; ".join(filter(None, notes)),
        "figure": draw_figure(kept).to_plotly_json(),
    }


def draw_figure(panel: Panel, *, log_budget: bool = True) -> go.Figure:
    """The lines of a panel with their bands: two traces a method, its band first.

    Args:
        panel: what is drawn.
        log_budget: whether the budget's axis is logarithmic.
    """
    axis = value_axis(panel)
    figure = go.Figure()
    for line in reversed(panel.series):  # the learned policy last: on top
        figure.add_trace(_band(line, axis))
        figure.add_trace(_line(line, axis))
    view = f"{panel.benchmark}/{panel.setting}/{panel.metric}/{panel.task}"
    figure.update_layout(
        template="plotly_white",
        margin={"l": 80, "r": 20, "t": 20, "b": 60},
        legend={"traceorder": "reversed"},
        hovermode="closest",
        uirevision="methods",  # hidden methods stay hidden; the axes below are each view's own
        xaxis={
            **budget_axis(panel.budgets, log_budget=log_budget),
            "uirevision": view,
        },
        yaxis={
            "type": "log" if panel.is_log else "linear",
            "title": {"text": value_label(panel.metric, axis.floor, "<br>")},
            "rangemode": "normal" if panel.is_log else "tozero",
            "exponentformat": "power",
            "uirevision": view,
        },
    )
    return figure


def budget_axis(budgets: Sequence[int], *, log_budget: bool) -> dict[str, Any]:
    """The axis of budgets, with a tick at each of them."""
    return {
        "type": "log" if log_budget else "linear",
        "title": {"text": "budget (tokens kept per KV head)"},
        "tickvals": list(budgets),
        "ticktext": [str(budget) for budget in budgets],
    }


def _line(line: Series, axis: ValueAxis) -> go.Scatter:
    style = style_of(line.method)
    return go.Scatter(
        name=line.method,
        legendgroup=line.method,
        uid=f"line-{line.method}",
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
        uid=f"band-{line.method}",
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
