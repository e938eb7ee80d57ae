"""A lineage graph as an SVG drawing, and as a web page: artifacts and runs from left to right, each kind with a look.

Both need nothing but themselves, and read on light and dark ground: nodes are light with dark text, flows are grey. On
the page, pointing at a node shows what it flows from and into; a click, or Enter, shows its record. Without scripts the
drawing and its tooltips remain. All text from the catalog is set as text, never as markup.
"""

import itertools
import textwrap
from collections.abc import Mapping, Sequence
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

# Kind -> outline and colour. Outlines fill the height and the width of a node; colours are Paul Tol's "light" scheme,
# made to stand under dark text.
_LOOKS = {
    "run": ("M34 0h56a34 34 0 0 1 0 68h-56a34 34 0 0 1 0 -68Z", "#DDDDDD"),  # a pill
    "model": ("M12 0h154l12 34l-12 34h-154l-12 -34Z", "#EE8866"),
    "prompts": ("M0 0h164l14 14v54h-178Zm164 0v14h14", "#BBCC33"),  # a page with a dog-ear
    "trace": ("M0 6a89 6 0 0 1 178 0v56a89 6 0 0 1 -178 0ZM178 6a89 6 0 0 1 -178 0", "#77AADD"),  # a can
    "policy": ("M10 0h158l10 10v48l-10 10h-158l-10 -10v-48Z", "#EEDD88"),
    "evaluation": ("M14 0h164l-14 68h-164Z", "#FFAABB"),
    "curve": ("M14 0h164l-14 68h-164Z", "#44BB99"),
}
_RECTANGLE = "M0 0h178v68h-178Z"
_SPARE_COLOURS = ("#99DDFF", "#AAAA00", "#F3EBB8", "#CCDDAA", "#FFD3DB", "#FFFFFF")


def _look(kind: str) -> tuple[str, str]:
    """Outline and colour of a kind: those of its first word, or a colour from a digest of its name; parts are paler."""
    spare = _SPARE_COLOURS[crc32(kind.encode()) % len(_SPARE_COLOURS)]
    outline, fill = _LOOKS.get(kind.partition("_")[0], (_RECTANGLE, spare))
    return outline, _lighter(fill) if is_part(kind) else fill


def _lighter(colour: str) -> str:
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A drawing and its nodes.

    Attributes:
        title: of the drawing.
        svg: the element `svg`; node number i is the element with `data-group="i"`.
        groups: the nodes that each drawn node stands for.
        aside: nodes that are left out.
    """

    title: str
    svg: str
    groups: tuple[tuple[LineageNode, ...], ...]
    aside: tuple[LineageNode, ...]


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
    lowest = max([*layout.heights, *(y for way in layout.ways for _, y in way)])
    height = lowest * _STEP + _STEP / 2 + 2 * _MARGIN
    title = _title(graph, grouped)
    svg = render_template(
        "lineage.svg", title=title, width=f"{width:g}", height=f"{height:g}", flows=flows, nodes=nodes
    )
    shown = {node.id for group in grouped.groups for node in group}
    aside = tuple(node for node in graph.nodes.values() if node.id not in shown)
    return Drawing(title=title, svg=svg, groups=grouped.groups, aside=aside)


def render_lineage_page(graph: LineageGraph) -> str:
    """The page as text; the records lie as JSON in the element `records`, a list for each drawn node."""
    drawing = draw_lineage(graph)
    ends = ends_of_runs(graph)
    nodes = [*drawing.groups, *([node] for node in drawing.aside)]
    records = [[record_of(node, ends) for node in group] for group in nodes]
    return render_template("lineage_file.html", drawing=drawing, aside=drawing.aside, records=records)


def ends_of_runs(graph: LineageGraph) -> dict[str, dict[str, dict[str, str]]]:
    """Run -> its inputs and outputs, each by name."""
    ends: dict[str, dict[str, dict[str, str]]] = {}
    for edge in graph.edges:
        run, artifact = (edge.target, edge.source) if edge.role == "input" else (edge.source, edge.target)
        ends.setdefault(run, {"inputs": {}, "outputs": {}})[f"{edge.role}s"][edge.name] = artifact
    return ends


def record_of(node: LineageNode, ends: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All facts about a node, by name; `ends` from `ends_of_runs`."""
    return {"id": node.id, "kind": node.kind, "name": node.name, **node.facts, **ends.get(node.id, {})}


def _title(graph: LineageGraph, grouped: GroupedGraph) -> str:
    (root,) = grouped.groups[0]
    words = {"up": "led to", "down": "came from", "around": "led to and came from"}[graph.direction]
    return f"What {words} {root.kind} {root.name} ({root.id})"


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
    """Values for the template of one group."""
    node = group[0]
    outline, fill = _look(node.kind)
    width = _RUN_WIDTH if node.kind == "run" else _ARTIFACT_WIDTH
    outcome = str(node.facts.get("outcome", "completed"))
    name = node.name + (", …" if len(group) > 1 and node.kind != "run" else "")
    kind = node.kind if len(group) == 1 else f"{len(group)} {node.kind.removesuffix('s')}s"
    room = int((width - 18) / _CHARACTER)  # characters of a line
    lines = [
        ("kind", kind + ("" if outcome == "completed" else f", {outcome}")),
        *(("name", line) for line in textwrap.wrap(name, room, max_lines=2, placeholder=" …")),
        ("id", node.id if len(group) == 1 else f"{node.id}, …"),
    ]
    first = _HEIGHT / 2 + 7 - _LINE * (len(lines) - 1) / 2  # the shapes have more room below than above
    return {
        "failed": outcome == "failed",
        "place": f"{left:.1f} {_y(layout.heights[place]) - _HEIGHT / 2:.1f}",
        "tooltip": "\n".join(f"{each.kind} {each.name} ({each.id})" for each in group),
        "stacked": len(group) > 1,
        "fill": fill,
        "shape": outline,
        "middle": f"{width / 2:g}",
        "lines": [(word, f"{first + index * _LINE:g}", line) for index, (word, line) in enumerate(lines)],
    }
