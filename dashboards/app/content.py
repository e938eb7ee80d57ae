"""What a page consists of, before it is HTML: figures, tables, and what is there instead of them."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

GREY = "#5b6470"
SEQUENTIAL, DIVERGING = "Cividis", "PuOr"
"""Colour scales that stay readable under the common colour-vision deficiencies, as in the report."""
FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#2a3340"}
_MARGIN = {"l": 70, "r": 20, "t": 16, "b": 56}


class Nothing(Exception):
    """There is nothing to show: what is missing, and the command that makes it."""

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(missing)
        self.missing = missing
        self.remedy = remedy


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its title.

    Attributes:
        name: names the element and the files that are downloaded.
        title: above it.
        drawing: what plotly draws.
        label: what is drawn, for those who cannot see it.
        height: in pixels.
        note: below it.
        choice: name of the choice that a click on the figure makes, with the clicked mark's first `customdata`.
        csv_url: where its numbers are; empty if they are not offered.
    """

    name: str
    title: str
    drawing: go.Figure
    label: str
    height: int = 460
    note: str = ""
    choice: str = ""
    csv_url: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        template: name of its template, which places the rest.
        content: what the template is given.
        status: HTTP's.
    """

    template: str
    content: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


def new_drawing(*, legend_above: bool = False, **layout: Any) -> go.Figure:
    """A figure with the look that all of them share.

    Args:
        legend_above: whether the legend lies above the figure and not beside it.
        layout: plotly's, where the figure is not as the others.
    """
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        margin=_MARGIN,
        font=FONT,
        hovermode="closest",
        **layout,
    )
    if legend_above:
        figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}, margin={"t": 44})
    return figure


def numbers_file(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as the text of a CSV file."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return stream.getvalue()


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
