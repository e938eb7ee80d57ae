"""A lineage graph in the words of W3C PROV: entities are artifacts, activities runs, and the agent is this software.

What a run made is a function of all that it read (that is what a stage key says), so it was derived from each of its
inputs but code, environment and request. A graph up holds all inputs of its runs, one down all outputs; what lies
beyond the graph is not in the document.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from storage.lineage.artifacts import SURROUNDINGS
from storage.lineage.graph import LineageEdge, LineageGraph, LineageNode

if TYPE_CHECKING:
    from prov.model import ProvDocument

NAMESPACE = "urn:kvpolicy:catalog:"
_PREFIX = "kvp"
_PACKAGE = "kvpolicy"
_RUN_FACTS = ("stage_key", "outcome", "reason", "seed", "git_commit", "git_dirty", "code_fingerprint", "hardware")


def provenance(graph: LineageGraph) -> ProvDocument:
    """Return a lineage graph as a PROV document."""
    from prov.model import ProvDocument

    document = ProvDocument()
    document.add_namespace(_PREFIX, NAMESPACE)
    inputs: dict[str, list[LineageEdge]] = {}
    for edge in graph.edges:
        if edge.role == "input":
            inputs.setdefault(edge.target, []).append(edge)
    for node in graph.nodes.values():
        if node.kind == "run":
            _add_activity(document, node, _software(graph, inputs.get(node.id, [])))
        else:
            _add_entity(document, node)
    for edge in graph.edges:
        if edge.role == "input":
            document.used(_name(edge.target), _name(edge.source), other_attributes={"prov:role": edge.name})
        else:
            document.wasGeneratedBy(_name(edge.target), _name(edge.source), other_attributes={"prov:role": edge.name})
            sources = [read.source for read in inputs.get(edge.source, [])]
            for source in dict.fromkeys(sources):
                if graph.nodes[source].kind not in SURROUNDINGS:
                    document.wasDerivedFrom(_name(edge.target), _name(source), _name(edge.source))
    return document


def render_provenance(graph: LineageGraph, form: str) -> str:
    """Return a lineage graph as the text of a PROV document: PROV-JSON ("json") or PROV-N ("provn")."""
    return f"{provenance(graph).serialize(format=form)}\n"


def _add_entity(document: ProvDocument, node: LineageNode) -> None:
    facts: dict[Any, Any] = {_name(name): node.facts[name] for name in ("digest", "uri") if node.facts.get(name)}
    kind = document.valid_qualified_name(_name(node.kind))  # as a name and not as a text
    document.entity(_name(node.id), {"prov:label": node.name, "prov:type": kind, **facts})


def _add_activity(document: ProvDocument, node: LineageNode, software: str) -> None:
    from prov.constants import PROV

    started = dt.datetime.fromisoformat(node.facts["started_at"]).replace(tzinfo=dt.UTC)
    ended = started + dt.timedelta(seconds=node.facts["seconds"])
    facts: dict[str, Any] = {_name(name): node.facts[name] for name in _RUN_FACTS if node.facts.get(name) is not None}
    attributes = {"prov:label": node.name, **facts}
    document.activity(_name(node.id), started, ended, attributes)
    if not document.get_record(software):
        label = software.removeprefix(f"{_PREFIX}:software-").replace("-", " ")
        document.agent(software, {"prov:type": PROV["SoftwareAgent"], "prov:label": label})
    document.wasAssociatedWith(_name(node.id), software)


def _software(graph: LineageGraph, inputs: list[LineageEdge]) -> str:
    """The agent of a run: this package, in the version that the run's environment names if the graph has it."""
    environment = next((edge.source for edge in inputs if graph.nodes[edge.source].kind == "environment"), None)
    packages = {} if environment is None else graph.nodes[environment].facts["metadata"].get("packages", {})
    version = packages.get(_PACKAGE)
    return _name(f"software-{_PACKAGE}" + (f"-{version}" if version else ""))


def _name(local: str) -> str:
    return f"{_PREFIX}:{local}"
