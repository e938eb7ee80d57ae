"""Figures with the look that all of them share, whether the dashboard or a report shows them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dashboards.rendering.table import Table

GREY = "#5b6470"
SEQUENTIAL, DIVERGING = "Cividis", "PuOr"
"""Colour scales that stay readable under the common colour-vision deficiencies."""
NAMES_AXIS = {"automargin": True, "autorange": "reversed", "type": "category"}
COLOUR_BAR = {"thickness": 14, "outlinewidth": 0}
FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#2a3340"}
_MARGIN = {"l": 70, "r": 20, "t": 16, "b": 56}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its title.

    Attributes:
        title: above it.
        drawing: plotly's figure.
        label: a description for readers who cannot see it.
        name: of the element and the files that are downloaded; the report numbers its figures instead.
        height: in pixels.
        note: below it.
        choice: name of the choice that a click on the figure makes, with the clicked mark's first `customdata`.
        csv_url: where its numbers are; empty if they are not offered.
        tables: its numbers, where they stand below it.
    """

    title: str
    drawing: go.Figure
    label: str
    name: str = ""
    height: int = 460
    note: str = ""
    choice: str = ""
    csv_url: str = ""
    tables: tuple[Table, ...] = ()


def new_drawing(*, legend_above: bool = False, legend_below: bool = False, **layout: Any) -> go.Figure:
    """A figure with the look that all of them share.

    Args:
        legend_above: whether the legend lies above the figure and not beside it.
        legend_below: whether it lies below the figure.
        layout: plotly's, where the figure is not as the others.
    """
    figure = go.Figure()
    figure.update_layout(template="plotly_white", margin=_MARGIN, font=FONT, hovermode="closest", **layout)
    if legend_above:
        figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin={"t": 44})
    if legend_below:
        figure.update_layout(legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"})
    return figure


def new_grid(titles: Sequence[str], *, columns: int, gap_pixels: int, height: int, **layout: Any) -> go.Figure:
    """A figure of several panels, row by row, each with a title above it.

    Args:
        titles: one a panel.
        columns: panels beside each other.
        gap_pixels: between rows of panels.
        height: of the whole figure, in pixels.
        layout: plotly's, where the figure is not as the others.
    """
    rows = -(-len(titles) // columns)
    drawing = make_subplots(
        rows,
        columns,
        figure=new_drawing(**layout),
        subplot_titles=titles,
        horizontal_spacing=0.22 / columns,
        vertical_spacing=min(gap_pixels / height, 0.9 / max(1, rows - 1)) if rows > 1 else 0,
    )
    return drawing.update_annotations(font={"size": 12}).update_layout(margin={"t": 40})


def cell(place: int, columns: int) -> dict[str, int]:
    """Where a panel lies in a grid, as plotly counts."""
    return {"row": place // columns + 1, "col": place % columns + 1}


def error_bars(values: Sequence[float], lows: Sequence[float | None], highs: Sequence[float | None]) -> dict[str, Any]:
    """Bars from the ends of intervals; nothing where there is no interval."""

    def reach(ends: Sequence[float | None]) -> list[float]:
        pairs = zip(values, ends, strict=True)
        return [0.0 if end is None or math.isnan(end) else abs(end - value) for value, end in pairs]

    return {"type": "data", "symmetric": False, "array": reach(highs), "arrayminus": reach(lows), "thickness": 1.2}


def linear_axis(title: str) -> dict[str, Any]:
    """An axis that begins at 0."""
    return {"type": "linear", "title": {"text": title}, "rangemode": "tozero"}


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ones, few enough to be read along an axis of their logarithms."""
    if high < 1.001 * low:
        return [low]
    if high < 4 * low:
        step = _round_up((high - low) / 5)
        ticks = [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return ticks or [low]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if high < 3000 * low else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return [tick for tick in ticks if 0.98 * low <= tick <= 1.02 * high]


def _round_up(value: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= 0.999 * value)


def log_axis(title: str, values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis for some positive values, with plain numbers along it."""
    known = [value for value in values if value > 0] or [1.0]
    ticks = log_ticks(min(known), max(known))
    texts = [f"{tick:.3g}" if 1e-4 < tick < 1e6 else f"{tick:.0e}" for tick in ticks]
    return {"title": {"text": title}, "type": "log", "tickvals": ticks, "ticktext": texts}
