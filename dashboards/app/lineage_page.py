"""Page: the lineage around any artifact or run; a click on a node walks there, and shows its record."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from markupsafe import Markup

from dashboards.app.choosing import lineage_link
from dashboards.app.content import Nothing, Page
from dashboards.app.records import Records
from dashboards.app.selection import Selection, page_url
from dashboards.lineage.picture import draw_lineage, ends_of_runs, record_of
from dashboards.rendering.formats import moment
from dashboards.rendering.table import Cell, Link, Table, table
from storage.errors import StorageError
from storage.lineage.graph import LineageGraph, LineageNode

_WAYS = [("around", "both"), ("up", "what it came from"), ("down", "what came from it")]
_STEPS = [("2", "2 steps"), ("4", "4 steps"), ("8", "8 steps"), ("all", "all steps")]
_NEWEST, _MOST_LISTED = 40, 200
_Url = Callable[..., str]
"""Makes the URL of this page with some choices changed."""


def lineage_page(records: Records, selection: Selection) -> Page:
    """The page.

    Raises:
        Nothing: nothing is recorded yet.
    """
    asked = selection.text("id")
    if not asked:
        return _start(records, selection)
    selection.keep("id", asked)
    way = selection.one("way", "Direction", _WAYS)
    steps = selection.one("steps", "How far", _STEPS, default="4")
    try:
        graph = records.catalog.lineage(asked, way, most_steps=None if steps == "all" else int(steps))
    except StorageError as error:
        content = {"title": "Lineage", "asked": asked, "problem": str(error)}
        return Page(template="lineage.html", content=content, status=404)
    drawing = draw_lineage(graph)
    root = graph.nodes[graph.root]

    def url(**changes: str) -> str:
        return page_url("lineage", {"id": graph.root, "way": way, "steps": steps} | changes)

    # A click on one node walks there; on a group it lists what is in it.
    targets = [url(id=group[0].id) if len(group) == 1 else url(group=group[0].id) for group in drawing.groups]
    opened = next((group for group in drawing.groups if group[0].id == selection.text("group")), ())
    return Page(
        template="lineage.html",
        content={
            "title": "Lineage",
            "lead": f"{root.kind} {root.name}",
            "asked": graph.root,
            "way": way,
            "steps": steps,
            "svg": Markup(drawing.svg),  # made of escaped texts
            "drawn": f"{len(graph.nodes)} nodes and {len(graph.edges)} flows, alike ones drawn as one.",
            "targets": targets,
            "group": _group_table(opened, url) if opened else None,
            "record": _record_table(root, graph, url),
            "record_title": f"{root.kind} {root.id}",
            "aside": [Link(text=f"{node.kind} {node.name}", url=url(id=node.id)) for node in drawing.aside],
        },
    )


def _start(records: Records, selection: Selection) -> Page:
    artifacts = records.artifacts()
    if not artifacts:
        raise Nothing("Nothing is recorded in this home yet.", "kvp run --preset smoke")
    kinds = sorted({row["kind"] for row in artifacts})
    kind = selection.one("kind", "Kind", [("", "all"), *((name, name.replace("_", " ")) for name in kinds)])
    newest = [row for row in artifacts if kind in ("", row["kind"])][:_NEWEST]
    return Page(
        template="lineage.html",
        content={
            "title": "Lineage",
            "lead": "What anything came from, and what came from it.",
            "asked": "",
            "table_of_newest": table(
                f"The newest of {len(artifacts):,} artifacts",
                ["made", "kind", "name", "id"],
                [
                    [moment(row["created_at"]), row["kind"], row["name"], lineage_link(row["artifact_id"])]
                    for row in newest
                ],
                numeric=(),
            ),
        },
    )


def _record_table(node: LineageNode, graph: LineageGraph, url: _Url) -> Table:
    record = record_of(node, ends_of_runs(graph))
    rows: list[list[Cell]] = []
    for name, value in record.items():
        if name in ("inputs", "outputs"):
            rows.append(
                [
                    name,
                    [Link(text=f"{role}: {key}", url=url(id=key)) for role, key in islice(value.items(), _MOST_LISTED)],
                ]
            )
        elif value not in ("", None):
            rows.append([name, _plain(value)])
    for words, role in (("made by", "output"), ("read by", "input")) if node.kind != "run" else ():
        if runs := _runs(graph, node.id, role):
            links = [Link(text=f"{graph.nodes[run].name} {run}", url=url(id=run)) for run in runs[:_MOST_LISTED]]
            rows.append([words, links])
    return table("", ["", ""], rows, numeric=())


def _plain(value: Any) -> str:
    """A value of a record as text; of a mapping one line an entry."""
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_plain(part)}" for name, part in value.items())
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _runs(graph: LineageGraph, artifact_id: str, role: str) -> list[str]:
    """Runs that read (`input`) or made (`output`) an artifact, each once."""
    edges = [edge for edge in graph.edges if edge.role == role and artifact_id in (edge.source, edge.target)]
    return list(dict.fromkeys(edge.target if role == "input" else edge.source for edge in edges))


def _group_table(group: Sequence[LineageNode], url: _Url) -> Table:
    return table(
        f"{len(group)} × {group[0].kind} that have the same place in this lineage",
        ["id", "name"],
        [[Link(text=node.id, url=url(id=node.id)), node.name] for node in group[:_MOST_LISTED]],
        numeric=(),
    )
