"""A lineage graph as one web page that needs nothing else: the drawing, and the record of whatever is pointed at.

The pointer on a node shows what it flows from and into; a click, or Enter, shows its record. Without scripts the
drawing and its tooltips are still there. All text from the catalog is set as text, never as markup.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from string import Template
from typing import Any

from dashboards.lineage_drawing import Drawing, draw_lineage
from storage.graph import LineageGraph, LineageNode

_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --ground: #fff; --ink: #222; --faint: #666; --rule: #ccc; }
@media (prefers-color-scheme: dark) { :root { --ground: #1c1c1e; --ink: #e8e8e8; --faint: #aaa; --rule: #444; } }
body { font-family: system-ui, sans-serif; background: var(--ground); color: var(--ink); margin: 1.5rem; }
h1 { font-size: 1.2rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 1.2rem 0 0.4rem; overflow-wrap: anywhere; }
#drawing { overflow: auto; border: 1px solid var(--rule); border-radius: 6px; max-height: 70vh; }
.node { cursor: pointer; }
.node:focus { outline: none; }
.node:focus .shape, .node:hover .shape, .node.chosen .shape { stroke: #005fcc; stroke-width: 2.6; }
.faded { opacity: 0.25; }
.note, .hint { color: var(--faint); font-size: 0.9rem; }
button { font: inherit; color: inherit; background: none; border: 1px solid var(--rule); border-radius: 4px; }
table { border-collapse: collapse; font-size: 0.85rem; }
th, td { text-align: left; vertical-align: top; padding: 0.15rem 0.8rem 0.15rem 0; border-top: 1px solid var(--rule); }
td { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$title</h1>
<div id="drawing">$svg</div>
<p class="note">$note</p>
<div id="record" aria-live="polite"><p class="hint">Choose a node to see its record.</p></div>
<script type="application/json" id="records">$records</script>
<script>
"use strict";
const records = JSON.parse(document.getElementById("records").textContent);
const nodes = Array.from(document.querySelectorAll("[data-group]"));
const flows = Array.from(document.querySelectorAll("[data-from]"));

function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}

function table(record) {
  const made = element("table");
  for (const [name, value] of Object.entries(record)) {
    const row = made.insertRow();
    row.append(element("th", name), element("td", typeof value === "string" ? value : JSON.stringify(value, null, 1)));
  }
  return made;
}

function show(node) {
  nodes.forEach((other) => other.classList.toggle("chosen", other === node));
  const parts = records[node.dataset.group].flatMap((record) => [
    element("h2", `$${record.kind} $${record.name}`),
    table(record),
  ]);
  document.getElementById("record").replaceChildren(...parts);
}

function point(node) {
  const near = new Set(node ? [node.dataset.group] : []);
  for (const flow of flows) {
    const touches = node && (flow.dataset.from === node.dataset.group || flow.dataset.to === node.dataset.group);
    flow.classList.toggle("faded", Boolean(node) && !touches);
    if (touches) near.add(flow.dataset.from).add(flow.dataset.to);
  }
  for (const other of nodes) {
    other.classList.toggle("faded", Boolean(node) && other.tagName === "g" && !near.has(other.dataset.group));
  }
}

for (const node of nodes) {
  node.addEventListener("click", () => show(node));
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(node); }
  });
  if (node.tagName === "g") {
    node.addEventListener("mouseenter", () => point(node));
    node.addEventListener("mouseleave", () => point(null));
  }
}
</script>
</body>
</html>
"""
)


def render_lineage_page(graph: LineageGraph) -> str:
    """The page as text; the records lie as JSON in the element `records`, a list for each drawn node."""
    drawing = draw_lineage(graph)
    shown = {node.id for group in drawing.groups for node in group}
    aside = [node for node in graph.nodes.values() if node.id not in shown]
    ends = ends_of_runs(graph)
    records = [[record_of(node, ends) for node in group] for group in [*drawing.groups, *([node] for node in aside)]]
    text = json.dumps(records, default=str, separators=(",", ":"), ensure_ascii=False)
    return _PAGE.substitute(
        title=escape(drawing.title),
        svg=drawing.svg,
        note=_note(drawing, aside),
        records=text.replace("<", "\\u003c"),  # no name in the catalog can end the script element
    )


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


def _note(drawing: Drawing, aside: Sequence[LineageNode]) -> str:
    buttons = "".join(
        f'<button data-group="{place}">{escape(f"{node.kind} {node.name}")}</button>'
        for place, node in enumerate(aside, start=len(drawing.groups))
    )
    return f"Not drawn, since every run reads them: {buttons}" if aside else ""
