"""A lineage graph as one web page that needs nothing else: the drawing, and the record of whatever is pointed at.

The pointer on a node shows what it flows from and into; a click, or Enter, shows its record. Without scripts the
drawing and its tooltips are still there. All text from the catalog is set as text, never as markup.
"""

from collections.abc import Mapping
from typing import Any

from dashboards.lineage.picture import draw_lineage
from dashboards.rendering.pages import render_template
from storage.lineage.graph import LineageGraph, LineageNode


def render_lineage_page(graph: LineageGraph) -> str:
    """The page as text; the records lie as JSON in the element `records`, a list for each drawn node."""
    drawing = draw_lineage(graph)
    shown = {node.id for group in drawing.groups for node in group}
    aside = [node for node in graph.nodes.values() if node.id not in shown]
    ends = ends_of_runs(graph)
    records = [[record_of(node, ends) for node in group] for group in [*drawing.groups, *([node] for node in aside)]]
    return render_template("lineage_file.html", drawing=drawing, aside=aside, records=records)


def ends_of_runs(graph: LineageGraph) -> dict[str, dict[str, dict[str, str]]]:
    """Run -> its inputs and outputs, each by name."""
    ends: dict[str, dict[str, dict[str, str]]] = {}
    for edge in graph.edges:
        run, artifact = (edge.target, edge.source) if edge.role == "input" else (edge.source, edge.target)
        ends.setdefault(run, {"inputs": {}, "outputs": {}})[f"{edge.role}s"][edge.name] = artifact
    return ends


def record_of(node: LineageNode, ends: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All that is known of a node, by name; `ends` from `ends_of_runs`."""
    return {"id": node.id, "kind": node.kind, "name": node.name, **node.facts, **ends.get(node.id, {})}
