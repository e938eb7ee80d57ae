"""All KV heads of a model as maps: layers from left to right, the KV heads of a layer from top to bottom."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from dashboards.figures.drawing import (
    COLOUR_BAR,
    DIVERGING,
    NAMES_AXIS,
    SEQUENTIAL,
    cell,
    log_axis,
    log_ticks,
    new_drawing,
    new_grid,
)
from dashboards.figures.styles import in_order, style_of
from dashboards.grouping import grouped
from dashboards.rendering.formats import number

_NAME = re.compile(r"L(\d+)\.H(\d+)")
_MARK = "#e8590c"
_NONE = {"cost": np.nan}
SHAPES = {
    "zipf_slope": "Zipf slope",
    "effective_tokens": "effective tokens",
    "rank_deviation": "rank deviation",
}
_BOX = ("lowerfence", "q1", "median", "q3", "upperfence")


@dataclass(frozen=True, kw_only=True)
class HeadMap:
    """One value a head.

    Attributes:
        values: in the order of heads; NaN is left empty.
        texts: at the pointer.
        colours: plotly's scale, range and bar.
        title: above the map; may be empty.
    """

    values: Sequence[float]
    texts: Sequence[str]
    colours: Mapping[str, Any]
    title: str = ""


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
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "Heads":
        """The heads that some rows name."""
        names = dict(sorted({row["head"]: row["head_name"] for row in rows}.items()))
        matches = [_NAME.fullmatch(name) for name in names.values()]
        places = [(int(match[1]), int(match[2])) if match else (at, 0) for at, match in enumerate(matches)]
        return cls(names=tuple(names.values()), places=tuple(places))

    @property
    def height(self) -> int:
        """Pixels that one map of them takes."""
        return 105 + max(22 * (1 + max(row for _, row in self.places)), 66)


def costs_by_method(rows: Iterable[Mapping[str, Any]], heads: Heads) -> dict[str, NDArray[np.float64]]:
    """Method to its cost of each head, mean over seeds.

    NaN where a head has none, and where the cost of a model without finite numbers has no place on a logarithmic scale.
    """
    by_method = grouped(rows, itemgetter("method"))
    costs = {}
    for method in in_order(by_method):
        by_head = grouped(by_method[method], itemgetter("head_name"))
        means = np.array([np.mean([row["cost"] for row in by_head.get(name, [_NONE])]) for name in heads.names])
        costs[method] = np.where((means > 0) & np.isfinite(means), means, np.nan)
    return costs


def draw_maps(heads: Heads, maps: Sequence[HeadMap], *, chosen: int | None = None) -> go.Figure:
    """Maps of heads below each other.

    Args:
        heads: the heads.
        maps: one or several of them.
        chosen: place of the head that is marked, if one is.
    """
    layers, rows = (1 + max(ends) for ends in zip(*heads.places, strict=True))
    height = heads.height * len(maps)

    def grid(values: Sequence[Any], empty: str | None = None) -> list[list[Any]]:
        by_place = dict(zip(heads.places, values, strict=True))
        return [[by_place.get((layer, row), empty) for layer in range(layers)] for row in range(rows)]

    drawing = new_grid([one.title for one in maps], columns=1, gap_pixels=85, height=height, plot_bgcolor="#e3e6ea")
    for place, one in enumerate(maps):
        values = [None if math.isnan(value) else value for value in one.values]
        drawing.add_heatmap(
            z=grid(values),
            text=grid([f"{name}<br>{text}" for name, text in zip(heads.names, one.texts, strict=True)], ""),
            customdata=grid(range(len(values))),
            hovertemplate="%{text}<extra></extra>",
            xgap=1,
            ygap=1,
            **one.colours,
            **cell(place, 1),
        )
        low, high = drawing.layout[f"yaxis{place + 1 if place else ''}"].domain
        drawing.data[-1].colorbar.update(y=(low + high) / 2, len=1.1 * (high - low))
    drawing.update_xaxes(title={"text": "layer"}, row=len(maps), col=1)
    drawing.update_xaxes(dtick=1 if layers <= 40 else 5, showgrid=False, zeroline=False)
    names = [f"H{row}" for row in range(rows)]
    drawing.update_yaxes(
        tickvals=list(range(rows)), ticktext=names, autorange="reversed", showgrid=False, zeroline=False
    )
    if not any(one.title for one in maps):
        drawing.update_layout(margin={"t": 16})
    if chosen is not None:
        layer, row = heads.places[chosen]
        corners = {"x0": layer - 0.5, "x1": layer + 0.5, "y0": row - 0.5, "y1": row + 0.5}
        drawing.add_shape(type="rect", line={"color": _MARK, "width": 3}, **corners)
    return drawing


def cost_map(costs: Sequence[float], *, title: str = "", shared: Sequence[float] | None = None) -> HeadMap:
    """The cost of each head, in logarithmic colours.

    Args:
        costs: in the order of heads.
        title: above the map.
        shared: costs whose range the colours span, where maps share it.
    """
    return HeadMap(
        values=[_log(cost) for cost in costs],
        texts=[f"cost {number(cost)}" for cost in costs],
        colours=log_colours([_log(cost) for cost in shared or costs]),
        title=title,
    )


def _log(cost: float) -> float:
    return math.log10(cost) if 0 < cost < math.inf else math.nan


def draw_cost_boxes(costs: Mapping[str, np.ndarray]) -> go.Figure:
    """One box a method, over heads: quartiles, lines from 5 % to 95 %, and the heads outside as dots."""
    everything = [float(cost) for values in costs.values() for cost in values if not np.isnan(cost)]
    drawing = new_drawing(
        showlegend=False,
        xaxis=log_axis("normalised eviction cost of a head (1 is optimal)", everything),
        yaxis=NAMES_AXIS,
    )
    for method, values in costs.items():
        known, colour = values[~np.isnan(values)], style_of(method).colour
        ends = np.quantile(known, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
        parts = {name: [end] for name, end in zip(_BOX, ends, strict=True)}
        drawing.add_box(y=[method], orientation="h", name=method, line={"color": colour}, **parts)
        outside = known[(known < ends[0]) | (known > ends[-1])].tolist()
        drawing.add_scatter(x=outside, y=[method] * len(outside), mode="markers", marker={"color": colour, "size": 4})
    return drawing


def linear_colours(values: Sequence[float]) -> dict[str, Any]:
    """Colours for values of any sign: dark is low."""
    known = [value for value in values if not math.isnan(value)] or [0.0]
    margin = 0.0 if max(known) > min(known) else 0.05 * abs(min(known)) + 1e-6
    ends = {"zmin": min(known) - margin, "zmax": max(known) + margin}
    return {"colorscale": SEQUENTIAL, **ends, "colorbar": COLOUR_BAR}


def log_colours(values: Sequence[float]) -> dict[str, Any]:
    """Colours for the logarithms (base 10) of positive values: dark is low."""
    known = [10**value for value in values if not math.isnan(value)] or [1.0]
    low, high = min(known), max(*known, 1.02 * min(known))
    bar = _log_bar(log_ticks(low, high), "")
    return {"colorscale": SEQUENTIAL, "zmin": math.log10(low), "zmax": math.log10(high), "colorbar": bar}


def ratio_colours(values: Sequence[float]) -> dict[str, Any]:
    """Colours for the logarithms (base 10) of ratios: white where both are alike, violet above 1, brown below."""
    most = max([abs(value) for value in values if not math.isnan(value)] or [0.0])
    most = max(most, math.log10(1.05))
    bar = _log_bar(sorted({*log_ticks(10**-most, 10**most), 1.0}), "×")
    return {"colorscale": DIVERGING, "zmid": 0, "zmin": -most, "zmax": most, "colorbar": bar}


def _log_bar(ticks: Sequence[float], unit: str) -> dict[str, Any]:
    texts = [f"{tick:.3g}{unit}" for tick in ticks]
    return {"tickvals": [math.log10(tick) for tick in ticks], "ticktext": texts} | COLOUR_BAR
