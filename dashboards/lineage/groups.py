"""A lineage graph with alike nodes as one group, for drawing.

A pipeline reads and makes hundreds of parts (fragments, head groups, shards), each in a run of its own. Nodes of one
kind that have the same place in the lineage are one group: the split is the coarsest in which the nodes of a group have
neighbours in the same groups (partition refinement). Code, environment and request go into every run and would hide all
else, so they are left out unless one is the root.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from storage.lineage.artifacts import SURROUNDINGS
from storage.lineage.graph import LineageEdge, LineageGraph, LineageNode

_NUMBERED_OR_LISTED = re.compile(r"[ _]?\d.*| .*")  # "fragment_00007" is a fragment, "curve query_aware kvp 0" a curve


_PARTS = ("_fragment", "_group", "_shard")


def is_part(kind: str) -> bool:
    """Whether artifacts of a kind are parts of another one, of which a pipeline makes hundreds; its name says so."""
    return kind.endswith(_PARTS)


@dataclass(frozen=True, kw_only=True)
class GroupedGraph:
    """Groups of nodes, and the flows between them.

    Attributes:
        groups: each with one node or more, all of one kind; the root's first, which holds the root alone.
        flows: (source, target) as places in `groups`, each once.
    """

    groups: tuple[tuple[LineageNode, ...], ...]
    flows: tuple[tuple[int, int], ...]


def group_alike(graph: LineageGraph) -> GroupedGraph:
    """Group the nodes of a graph."""
    nodes = {name: node for name, node in graph.nodes.items() if node.kind not in SURROUNDINGS or name == graph.root}
    edges = [edge for edge in graph.edges if edge.source in nodes and edge.target in nodes]
    class_of = _refined(_first_classes(graph.root, nodes, edges), edges)
    members: dict[int, list[LineageNode]] = {class_of[graph.root]: []}
    for name, node in nodes.items():
        members.setdefault(class_of[name], []).append(node)
    place = {number: index for index, number in enumerate(members)}
    flows = dict.fromkeys((place[class_of[edge.source]], place[class_of[edge.target]]) for edge in edges)
    return GroupedGraph(groups=tuple(map(tuple, members.values())), flows=tuple(flows))


def _first_classes(root: str, nodes: Mapping[str, LineageNode], edges: list[LineageEdge]) -> dict[str, int]:
    """By kind, by stage and outcome of a run, and by the role of an artifact in its runs."""
    names: dict[str, set[str]] = {name: set() for name in nodes}
    for edge in edges:
        artifact = edge.source if edge.role == "input" else edge.target
        names[artifact].add(_NUMBERED_OR_LISTED.sub("", edge.name))
    return _numbered(
        {
            name: (
                name == root,
                node.kind,
                (node.name, node.facts.get("outcome")) if node.kind == "run" else frozenset(names[name]),
            )
            for name, node in nodes.items()
        }
    )


def _refined(classes: dict[str, int], edges: list[LineageEdge]) -> dict[str, int]:
    before: dict[str, list[str]] = {name: [] for name in classes}
    after: dict[str, list[str]] = {name: [] for name in classes}
    for edge in edges:
        before[edge.target].append(edge.source)
        after[edge.source].append(edge.target)
    while True:
        finer = _numbered(
            {
                name: (
                    number,
                    frozenset(classes[other] for other in before[name]),
                    frozenset(classes[other] for other in after[name]),
                )
                for name, number in classes.items()
            }
        )
        if len(set(finer.values())) == len(set(classes.values())):
            return finer
        classes = finer


def _numbered(colours: Mapping[str, object]) -> dict[str, int]:
    numbers: dict[object, int] = {}
    return {name: numbers.setdefault(colour, len(numbers)) for name, colour in colours.items()}
