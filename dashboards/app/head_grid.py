"""All KV heads of a model as a map: layers from left to right, the KV heads of a layer from top to bottom."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from dashboards.app.content import DIVERGING, SEQUENTIAL, log_ticks, new_drawing
from dashboards.app.records import Row

_NAME = re.compile(r"L(\d+)\.H(\d+)")
_MARK = "#e8590c"


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of a model.

    Attributes:
        names: name of each head, such as L03.H1, in the order of heads.
        places: (layer, KV head) of each.
    """

    names: tuple[str, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> "Heads":
        """The heads that some rows name."""
        names = dict(sorted({row["head"]: row["head_name"] for row in rows}.items()))
        matches = [_NAME.fullmatch(name) for name in names.values()]
        places = [(int(match[1]), int(match[2])) if match else (at, 0) for at, match in enumerate(matches)]
        return cls(names=tuple(names.values()), places=tuple(places))

    @property
    def height(self) -> int:
        """Pixels that a map of them takes."""
        return 105 + max(22 * (1 + max(row for _, row in self.places)), 66)

    def draw(
        self, values: Sequence[float], texts: Sequence[str], *, colours: Mapping[str, Any], chosen: int | None
    ) -> go.Figure:
        """A map of one value a head; what is NaN is left empty.

        Args:
            values: in the order of heads.
            texts: what the pointer shows.
            colours: plotly's scale, range and bar.
            chosen: place of the head that is marked, if one is.
        """
        layers = 1 + max(layer for layer, _ in self.places)
        rows = 1 + max(row for _, row in self.places)
        z: list[list[float | None]] = [[None] * layers for _ in range(rows)]
        words = [[""] * layers for _ in range(rows)]
        heads: list[list[int | None]] = [[None] * layers for _ in range(rows)]
        for head, (layer, row) in enumerate(self.places):
            z[row][layer] = None if math.isnan(values[head]) else values[head]
            words[row][layer] = f"{self.names[head]}<br>{texts[head]}"
            heads[row][layer] = head
        drawing = new_drawing(
            xaxis={"title": {"text": "layer"}, "dtick": 1 if layers <= 40 else 5, "showgrid": False, "zeroline": False},
            yaxis={
                "tickvals": list(range(rows)),
                "ticktext": [f"H{row}" for row in range(rows)],
                "autorange": "reversed",
                "showgrid": False,
                "zeroline": False,
            },
            plot_bgcolor="#e3e6ea",
        )
        drawing.add_heatmap(
            z=z, text=words, customdata=heads, hovertemplate="%{text}<extra></extra>", xgap=1, ygap=1, **colours
        )
        if chosen is not None:
            layer, row = self.places[chosen]
            corners = {"x0": layer - 0.5, "x1": layer + 0.5, "y0": row - 0.5, "y1": row + 0.5}
            drawing.add_shape(type="rect", line={"color": _MARK, "width": 3}, **corners)
        return drawing


def log_colours(values: Sequence[float]) -> dict[str, Any]:
    """Colours for the logarithms (base 10) of positive values: dark is low."""
    known = [10**value for value in values if not math.isnan(value)] or [1.0]
    low, high = min(known), max(*known, 1.02 * min(known))
    ticks = log_ticks(low, high)
    return {
        "colorscale": SEQUENTIAL,
        "zmin": math.log10(low),
        "zmax": math.log10(high),
        "colorbar": _bar(ticks, [f"{tick:.3g}" for tick in ticks]),
    }


def ratio_colours(values: Sequence[float]) -> dict[str, Any]:
    """Colours for the logarithms (base 10) of ratios: white where both are alike, violet above 1, brown below."""
    most = max([abs(value) for value in values if not math.isnan(value)] or [0.0])
    most = max(most, math.log10(1.05))
    ticks = [tick for tick in log_ticks(10**-most, 10**most) if tick != 1]
    ticks = sorted({*ticks, 1.0})
    return {
        "colorscale": DIVERGING,
        "zmid": 0,
        "zmin": -most,
        "zmax": most,
        "colorbar": _bar(ticks, [f"{tick:.3g}×" for tick in ticks]),
    }


def _bar(ticks: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    return {
        "tickvals": [math.log10(tick) for tick in ticks],
        "ticktext": list(texts),
        "thickness": 14,
        "outlinewidth": 0,
        "len": 1.1,
    }
