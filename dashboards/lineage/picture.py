"""A lineage graph as an SVG drawing: artifacts and runs from left to right, each kind with a shape, colour and label.

It needs nothing but itself, and reads on light and dark ground: nodes are light with dark text, flows are grey.
"""

import itertools
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from dashboards.lineage.groups import GroupedGraph, group_alike, is_part
from dashboards.lineage.layout import Layout, lay_out
from dashboards.rendering.pages import render_template
from storage.lineage.graph import LineageGraph, LineageNode

_HEIGHT, _STEP, _GAP, _MARGIN = 68.0, 84.0, 40.0, 14.0
_LINE = 13.0
_RUN_WIDTH, _ARTIFACT_WIDTH = 124.0, 178.0
_CHARACTER = 6.2  # mean width of a character of a label, on the wide side

Outline = Callable[[float, float], str]


def _polygon(*points: tuple[float, float]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) + "Z"


def _rectangle(w: float, h: float) -> str:
    return _polygon((0, 0), (w, 0), (w, h), (0, h))


def _pill(w: float, h: float) -> str:
    r = h / 2
    return f"M{r:g} 0H{w - r:g}A{r:g} {r:g} 0 0 1 {w - r:g} {h:g}H{r:g}A{r:g} {r:g} 0 0 1 {r:g} 0Z"


def _hexagon(w: float, h: float) -> str:
    return _polygon((12, 0), (w - 12, 0), (w, h / 2), (w - 12, h), (12, h), (0, h / 2))


def _page(w: float, h: float) -> str:
    return _polygon((0, 0), (w - 14, 0), (w, 14), (w, h), (0, h)) + f"M{w - 14:g} 0V14H{w:g}"


def _can(w: float, h: float) -> str:
    arc = f"A{w / 2:g} 6 0 0 "
    return f"M0 6{arc}1 {w:g} 6V{h - 6:g}{arc}1 0 {h - 6:g}ZM{w:g} 6{arc}1 0 6"


def _cut(w: float, h: float) -> str:
    return _polygon((10, 0), (w - 10, 0), (w, 10), (w, h - 10), (w - 10, h), (10, h), (0, h - 10), (0, 10))


def _slanted(w: float, h: float) -> str:
    return _polygon((14, 0), (w, 0), (w - 14, h), (0, h))


# Colours are Paul Tol's "light" scheme, made to stand under dark text.
_LOOKS: dict[str, tuple[Outline, str]] = {
    "run": (_pill, "#DDDDDD"),
    "model": (_hexagon, "#EE8866"),
    "prompts": (_page, "#BBCC33"),
    "trace": (_can, "#77AADD"),
    "policy": (_cut, "#EEDD88"),
    "evaluation": (_slanted, "#FFAABB"),
    "curve": (_slanted, "#44BB99"),
}
_SPARE_COLOURS = ("#99DDFF", "#AAAA00", "#F3EBB8", "#CCDDAA", "#FFD3DB", "#FFFFFF")


def _look(kind: str) -> tuple[Outline, str]:
    """Shape and colour of a kind: that of its first word, or else one from a digest of its name; parts are lighter."""
    place = crc32(kind.encode())
    outline, fill = _LOOKS.get(kind.partition("_")[0], (_rectangle, _SPARE_COLOURS[place % len(_SPARE_COLOURS)]))
    return outline, _lighter(fill) if is_part(kind) else fill


def _lighter(colour: str) -> str:
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A drawing and what is in it.

    Attributes:
        title: what is drawn.
        svg: the element `svg`; node number i is the element with `data-group="i"`.
        groups: the nodes that each drawn node stands for.
    """

    title: str
    svg: str
    groups: tuple[tuple[LineageNode, ...], ...]


def draw_lineage(graph: LineageGraph) -> Drawing:
    """Draw a lineage graph."""
    grouped = group_alike(graph)
    layout = lay_out(len(grouped.groups), grouped.flows)
    widths = [_RUN_WIDTH if group[0].kind == "run" else _ARTIFACT_WIDTH for group in grouped.groups]
    columns = [
        max((width for width, layer in zip(widths, layout.layers, strict=True) if layer == column), default=0.0)
        for column in range(max(layout.layers) + 1)
    ]
    lefts = list(itertools.accumulate((width + _GAP for width in columns), initial=_MARGIN))
    flows = [_flow(flow, way, lefts, columns, widths) for flow, way in zip(grouped.flows, layout.ways, strict=True)]
    nodes = [
        _node(place, group, lefts[layout.layers[place]] + (columns[layout.layers[place]] - widths[place]) / 2, layout)
        for place, group in enumerate(grouped.groups)
    ]
    width = lefts[-1] - _GAP + _MARGIN
    height = max(y for way in [*layout.ways, _centres(layout)] for _, y in way) * _STEP + _STEP / 2 + 2 * _MARGIN
    title = _title(graph, grouped)
    svg = render_template(
        "lineage.svg", title=title, width=f"{width:g}", height=f"{height:g}", flows=flows, nodes=nodes
    )
    return Drawing(title=title, svg=svg, groups=grouped.groups)


def _title(graph: LineageGraph, grouped: GroupedGraph) -> str:
    (root,) = grouped.groups[0]
    words = {"up": "led to", "down": "came from", "around": "led to and came from"}[graph.direction]
    return f"What {words} {root.kind} {root.name} ({root.id})"


def _centres(layout: Layout) -> list[tuple[int, float]]:
    return list(zip(layout.layers, layout.heights, strict=True))


def _y(height: float) -> float:
    return _MARGIN + height * _STEP


def _flow(
    flow: tuple[int, int],
    way: Sequence[tuple[int, float]],
    lefts: Sequence[float],
    columns: Sequence[float],
    widths: Sequence[float],
) -> tuple[int, int, str, str]:
    """Source, target, a smooth line between their sides that is straight along lanes, and the place of its tip."""
    source, target = flow
    first, last = way[0][0], way[-1][0]
    x = lefts[first] + (columns[first] + widths[source]) / 2
    path, y = f"M{x:.1f} {_y(way[0][1]):.1f}", _y(way[0][1])
    for layer, height in way[1:]:
        end = lefts[layer] + ((columns[layer] - widths[target]) / 2 - 6 if layer == last else 0.0)
        next_y = _y(height)
        start, bend = end - _GAP + 6, _GAP / 2
        path += f"H{start:.1f}C{start + bend:.1f} {y:.1f} {end - bend:.1f} {next_y:.1f} {end:.1f} {next_y:.1f}"
        y = next_y
    return source, target, path, f"M{end:.1f} {y - 3.5:.1f}"


def _node(place: int, group: Sequence[LineageNode], left: float, layout: Layout) -> dict[str, Any]:
    """What the template draws of a group."""
    node = group[0]
    outline, fill = _look(node.kind)
    width = _RUN_WIDTH if node.kind == "run" else _ARTIFACT_WIDTH
    outcome = str(node.facts.get("outcome", "completed"))
    name = node.name + (", …" if len(group) > 1 and node.kind != "run" else "")
    lines = [
        ("kind", _kind(group) + ("" if outcome == "completed" else f", {outcome}")),
        *(("name", line) for line in textwrap.wrap(name, _room(width), max_lines=2, placeholder=" …")),
        ("id", node.id if len(group) == 1 else f"{node.id}, …"),
    ]
    first = _HEIGHT / 2 + 7 - _LINE * (len(lines) - 1) / 2  # the shapes have more room below than above
    return {
        "failed": outcome == "failed",
        "place": f"{left:.1f} {_y(layout.heights[place]) - _HEIGHT / 2:.1f}",
        "tooltip": "\n".join(f"{each.kind} {each.name} ({each.id})" for each in group),
        "stacked": len(group) > 1,
        "fill": fill,
        "shape": outline(width, _HEIGHT),
        "middle": f"{width / 2:g}",
        "lines": [(word, f"{first + index * _LINE:g}", line) for index, (word, line) in enumerate(lines)],
    }


def _kind(group: Sequence[LineageNode]) -> str:
    kind = group[0].kind
    return kind if len(group) == 1 else f"{len(group)} {kind.removesuffix('s')}s"


def _room(width: float) -> int:
    """Characters that a line of a label has room for."""
    return int((width - 18) / _CHARACTER)
