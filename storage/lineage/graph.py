"""Lineage as a graph: from any id, everything that it came from or went into.

The walk asks for one layer at a time, so its cost depends on the answer and not on the size of the catalog.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.errors import StorageError
from storage.tables.lance_table import Table, quote

MADE = ("completed", "repeated")  # outcomes of runs whose outputs were registered
_SHORTEST_PREFIX = 6
_ID = re.compile(r"[A-Za-z0-9_-]+")
_SHOWN = 5
_RUN_FACTS = (
    "stage_key",
    "outcome",
    "reason",
    "seed",
    "git_commit",
    "git_dirty",
    "code_fingerprint",
    "hardware",
    "seconds",
    "prefect_flow_run_id",
    "prefect_task_run_id",
    "mlflow_run_id",
)


@dataclass(frozen=True, kw_only=True)
class LineageNode:
    """An artifact or a run.

    Attributes:
        id: its id.
        kind: kind of the artifact, or "run".
        name: name of the artifact, or stage of the run.
        facts: what else is known: digest, uri, created_at; or outcome, started_at, seconds, seed, git_commit, ...
    """

    id: str
    kind: str
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LineageEdge:
    """A flow from an artifact into a run, or from a run into an artifact.

    Attributes:
        source: id of the node that the flow leaves.
        target: id of the node that it enters.
        role: "input" (into a run) or "output" (of a run).
        name: what the artifact is to the run.
    """

    source: str
    target: str
    role: str
    name: str


@dataclass(frozen=True, kw_only=True)
class LineageGraph:
    """Everything up or down from a root, or around it, or as much of that as a number of steps reaches.

    Attributes:
        root: id that was asked for, in full.
        direction: "up", "down" or "around".
        nodes: id -> node, the root first.
        edges: the flows between them.
    """

    root: str
    direction: str
    nodes: Mapping[str, LineageNode]
    edges: tuple[LineageEdge, ...]

    def kinds(self) -> set[str]:
        """Return the kinds of the nodes."""
        return {node.kind for node in self.nodes.values()}

    def to_json(self) -> dict[str, Any]:
        """Return the graph as JSON values."""
        return {
            "root": self.root,
            "direction": self.direction,
            "nodes": [
                {"id": node.id, "kind": node.kind, "name": node.name, **node.facts} for node in self.nodes.values()
            ],
            "edges": [
                {"source": edge.source, "target": edge.target, "role": edge.role, "name": edge.name}
                for edge in self.edges
            ],
        }


def render_tree(graph: LineageGraph) -> list[str]:
    """Return the lines of a plain-text tree; what was drawn once is only named after that."""
    children: dict[str, list[str]] = {}
    for edge in graph.edges:
        parent, child = (edge.target, edge.source) if graph.direction == "up" else (edge.source, edge.target)
        children.setdefault(parent, []).append(child)
    lines: list[str] = []
    drawn: set[str] = set()

    def draw(name: str, first: str, rest: str) -> None:
        again = name in drawn and name in children
        lines.append(first + _label(graph.nodes[name]) + ("  (see above)" if again else ""))
        drawn.add(name)
        if again:
            return
        below = children.get(name, [])
        for index, child in enumerate(below):
            last = index == len(below) - 1
            draw(child, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "))

    draw(graph.root, "", "")
    return lines


def _label(node: LineageNode) -> str:
    outcome = node.facts.get("outcome", "completed")
    return f"{node.kind} {node.id}  {node.name}" + ("" if outcome == "completed" else f"  ({outcome})")


def walk(tables: Mapping[str, Table], any_id: str, direction: str, most_steps: int | None = None) -> LineageGraph:
    """Walk the lineage of an id; see `storage.catalog.catalog.Catalog.lineage`.

    Raises:
        StorageError: if the id is unknown or ambiguous, or the direction is none of "up", "down" and "around".
    """
    if direction not in ("up", "down", "around"):
        raise StorageError(f"lineage direction {direction!r}: expected 'up', 'down' or 'around'")
    root = _resolve(tables, any_id)
    if direction != "around":
        return _walk(tables, root, direction, most_steps)
    up, down = (_walk(tables, root, way, most_steps) for way in ("up", "down"))
    return LineageGraph(
        root=root,
        direction=direction,
        nodes={**up.nodes, **down.nodes},
        edges=tuple(dict.fromkeys([*up.edges, *down.edges])),
    )


def _walk(tables: Mapping[str, Table], root: str, direction: str, most_steps: int | None) -> LineageGraph:
    # Up: an artifact leads to the runs that made it, a run to what it read. Down: the other way about.
    of_artifact, of_run = ("output", "input") if direction == "up" else ("input", "output")
    reached, edges = {root: None}, dict[LineageEdge, None]()  # ordered, each once
    artifacts, runs = ({root}, set[str]()) if not root.startswith("run-") else (set[str](), {root})
    known = _run_nodes(tables, runs)
    left = float("inf") if most_steps is None else most_steps
    while (artifacts or runs) and left > 0:
        left -= 1
        steps = tables["edges"].scan_in("artifact_id", artifacts, f"role = '{of_artifact}'")
        steps += tables["edges"].scan_in("run_id", runs, f"role = '{of_run}'")
        known |= _run_nodes(tables, {step["run_id"] for step in steps} - known.keys())
        steps = [step for step in steps if _is_published(step, known)]
        edges.update(dict.fromkeys(map(_edge, steps)))
        artifacts, runs = ({step[column] for step in steps} - reached.keys() for column in ("artifact_id", "run_id"))
        reached.update(dict.fromkeys([step[column] for step in steps for column in ("artifact_id", "run_id")]))
    nodes = _artifact_nodes(tables, reached.keys() - known.keys()) | known
    if root not in nodes:
        raise StorageError(f"nothing recorded under {root}: its run did not complete")
    return LineageGraph(
        root=root,
        direction=direction,
        nodes={name: nodes[name] for name in reached if name in nodes},
        edges=tuple(edges),
    )


def _is_published(edge: Mapping[str, Any], runs: Mapping[str, LineageNode]) -> bool:
    """Whether it counts: not of a run without a row, whose writer died, nor an output of one that failed in the end."""
    run = runs.get(edge["run_id"])
    return run is not None and (edge["role"] == "input" or run.facts["outcome"] in MADE)


def _edge(row: Mapping[str, Any]) -> LineageEdge:
    ends = (row["artifact_id"], row["run_id"])
    source, target = ends if row["role"] == "input" else reversed(ends)
    return LineageEdge(source=source, target=target, role=row["role"], name=row["name"])


def _artifact_nodes(tables: Mapping[str, Table], ids: Iterable[str]) -> dict[str, LineageNode]:
    nodes: dict[str, LineageNode] = {}
    for row in tables["artifacts"].scan_in("artifact_id", ids):
        facts = {name: row[name] for name in ("digest", "uri")}
        facts["created_at"] = row["created_at"].isoformat()
        facts["metadata"] = json.loads(row["metadata_json"])
        node = LineageNode(id=row["artifact_id"], kind=row["kind"], name=row["name"], facts=facts)
        nodes.setdefault(node.id, node)
    return nodes


def _run_nodes(tables: Mapping[str, Table], ids: Iterable[str]) -> dict[str, LineageNode]:
    nodes = {}
    for row in tables["runs"].scan_in("run_id", ids):
        facts = {name: row[name] for name in _RUN_FACTS}
        facts["parameters"] = json.loads(row["parameters_json"])
        facts["started_at"] = row["started_at"].isoformat()
        nodes[row["run_id"]] = LineageNode(id=row["run_id"], kind="run", name=row["stage"], facts=facts)
    return nodes


def _resolve(tables: Mapping[str, Table], any_id: str) -> str:
    """Return the artifact or run id that is meant."""
    if not _ID.fullmatch(any_id):
        raise StorageError(f"{any_id!r} is no id: expected letters, digits, '-' and '_'")
    matches = _matches(tables, f"= {quote(any_id)}")
    if not matches and len(any_id) >= _SHORTEST_PREFIX:
        matches = _matches(tables, _begins_with(any_id)) | _matches_of_digest(tables, any_id)
    if not matches:
        hint = (
            "" if len(any_id) >= _SHORTEST_PREFIX else f"; a shortened id needs at least {_SHORTEST_PREFIX} characters"
        )
        raise StorageError(
            f"no artifact, run or MLflow run {any_id!r} in the catalog{hint}: `kvp sql` lists them in the tables "
            "`artifacts` and `runs`"
        )
    if len(matches) > 1:
        names = sorted(matches)
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise StorageError(f"{any_id!r} may mean {len(names)} things: {shown}; give more of the id")
    return matches.pop()


def _begins_with(start: str) -> str:
    # A range, which an index serves; "~" comes after every character of an id.
    return f"BETWEEN {quote(start)} AND {quote(start + '~')}"


def _matches_of_digest(tables: Mapping[str, Table], start: str) -> set[str]:
    """Artifacts and runs whose id begins so after its kind, as pages shorten them."""
    artifacts = tables["artifacts"].scan(f"digest {_begins_with(start)}", ["artifact_id"])["artifact_id"].to_pylist()
    return {*artifacts, *_matches(tables, _begins_with(f"run-{start}"))}


def _matches(tables: Mapping[str, Table], condition: str) -> set[str]:
    ids = set(tables["artifacts"].scan(f"artifact_id {condition}", ["artifact_id"])["artifact_id"].to_pylist())
    for column in ("run_id", "mlflow_run_id"):
        # A skipped run stands for the run whose results it used.
        rows = tables["runs"].scan(f"{column} {condition}", ["run_id", "reused_run_id"]).to_pylist()
        ids |= {row["reused_run_id"] or row["run_id"] for row in rows}
    curves = tables["curves"].scan(f"mlflow_run_id {condition}", ["curve_id", "run_id"]).to_pylist()
    runs = _run_nodes(tables, {row["run_id"] for row in curves})
    completed = {name for name, run in runs.items() if run.facts["outcome"] == "completed"}
    return ids | {row["curve_id"] for row in curves if row["run_id"] in completed}
