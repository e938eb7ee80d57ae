"""W3C PROV: what a reader of PROV-JSON finds is the graph that was written."""

from __future__ import annotations

import importlib.metadata
import json
from collections import Counter
from typing import Any

import pytest
from prov.model import ProvDocument

from kvpolicy.digests import digest_bytes
from storage.catalog.catalog import Catalog
from storage.lineage.artifacts import Artifact
from storage.lineage.graph import LineageGraph
from storage.lineage.provenance import NAMESPACE, render_provenance
from tests.storage.conftest import artifact

HOSTILE = """a "name" with <tags> & 'quotes' \\ and é\nlines"""
MODEL = Artifact(kind="model", digest=digest_bytes(b"m"), name=HOSTILE, uri="file:///m")


@pytest.fixture
def graph(catalog: Catalog) -> LineageGraph:
    """Two stages over one model: the first makes two fragments, the second reads them and makes a policy set."""
    catalog.register(MODEL)
    fragments = [artifact("trace_fragment", name) for name in "ab"]
    with _stage(catalog, "collect", {"model": MODEL.artifact_id}) as run:
        for index, each in enumerate(fragments):
            run.output(f"fragment_{index}", each)
    inputs = {"model": MODEL.artifact_id, **{f"part_{index}": each.artifact_id for index, each in enumerate(fragments)}}
    with _stage(catalog, "train", inputs) as run:
        run.output("policy", artifact("policy_set", "p"))
    return catalog.lineage(artifact("policy_set", "p").artifact_id)


def _stage(catalog: Catalog, stage: str, inputs: dict[str, str]) -> Any:
    return catalog.record_run(
        stage=stage, stage_key=stage * 9, parameters={}, inputs=inputs, code_fingerprint="f", seed=1
    )


def _pairs(document: dict[str, Any], relation: str, first: str, second: str) -> Counter[tuple[str, str, str]]:
    """(first, second, role) of a relation as PROV-JSON writes it (W3C Member Submission, 2013), without its prefix."""
    return Counter(
        (entry[first].removeprefix("kvp:"), entry[second].removeprefix("kvp:"), entry.get("prov:role", ""))
        for entry in document[relation].values()
    )


def test_the_json_holds_the_graph_and_what_follows_from_it(graph: LineageGraph) -> None:
    document = json.loads(render_provenance(graph, "json"))
    assert document["prefix"] == {"kvp": NAMESPACE}
    runs = {name for name, node in graph.nodes.items() if node.kind == "run"}
    assert {name.removeprefix("kvp:") for name in document["activity"]} == runs
    assert {name.removeprefix("kvp:") for name in document["entity"]} == set(graph.nodes) - runs
    used = Counter((edge.target, edge.source, edge.name) for edge in graph.edges if edge.role == "input")
    made = Counter((edge.target, edge.source, edge.name) for edge in graph.edges if edge.role == "output")
    assert _pairs(document, "used", "prov:activity", "prov:entity") == used
    assert _pairs(document, "wasGeneratedBy", "prov:entity", "prov:activity") == made
    fragments = [artifact("trace_fragment", name).artifact_id for name in "ab"]
    policy = artifact("policy_set", "p").artifact_id
    derived = _pairs(document, "wasDerivedFrom", "prov:generatedEntity", "prov:usedEntity")
    assert set(derived) == {
        *((fragment, MODEL.artifact_id, "") for fragment in fragments),
        *((policy, source, "") for source in (MODEL.artifact_id, *fragments)),
    }
    (agent,) = document["agent"].items()
    assert agent[1]["prov:type"] == {"$": "prov:SoftwareAgent", "type": "xsd:QName"}  # a name, not a text
    assert agent[1]["prov:label"] == f"kvpolicy {importlib.metadata.version('kvpolicy')}"
    associated = _pairs(document, "wasAssociatedWith", "prov:activity", "prov:agent")
    assert {(run, name) for run, name, _ in associated} == {(run, agent[0].removeprefix("kvp:")) for run in runs}
    model = document["entity"][f"kvp:{MODEL.artifact_id}"]
    assert (model["prov:label"], model["kvp:digest"], model["kvp:uri"]) == (HOSTILE, MODEL.digest, "file:///m")
    assert model["prov:type"]["$"] == "kvp:model"


def test_times_are_those_of_the_run(graph: LineageGraph, catalog: Catalog) -> None:
    document = json.loads(render_provenance(graph, "json"))
    for row in catalog.rows("runs"):
        activity = document["activity"][f"kvp:{row['run_id']}"]
        assert activity["prov:startTime"] == row["started_at"].isoformat() + "+00:00"
        assert activity["prov:endTime"] == row["ended_at"].isoformat() + "+00:00"


def test_another_reader_finds_the_same_document(graph: LineageGraph) -> None:
    read = ProvDocument.deserialize(content=render_provenance(graph, "json"), format="json")
    kinds = Counter(type(record).__name__ for record in read.get_records())
    runs = sum(node.kind == "run" for node in graph.nodes.values())
    roles = Counter(edge.role for edge in graph.edges)
    assert kinds == {
        "ProvActivity": runs,
        "ProvEntity": len(graph.nodes) - runs,
        "ProvAgent": 1,
        "ProvUsage": roles["input"],
        "ProvGeneration": roles["output"],
        "ProvAssociation": runs,
        "ProvDerivation": 5,
    }
    again = ProvDocument.deserialize(content=read.serialize(format="json"), format="json")
    assert again == read


def test_prov_n_names_every_node_once(graph: LineageGraph) -> None:
    text = render_provenance(graph, "provn")
    assert text.startswith("document\n") and text.endswith("endDocument\n")
    for node in graph.nodes.values():
        word = "activity" if node.kind == "run" else "entity"
        assert text.count(f"{word}(kvp:{node.id},") == 1
    assert text.count("  used(") == sum(edge.role == "input" for edge in graph.edges)


def test_a_graph_down_has_what_it_knows(catalog: Catalog, graph: LineageGraph) -> None:
    down = catalog.lineage(MODEL.artifact_id, "down")
    document = json.loads(render_provenance(down, "json"))
    assert len(document["wasGeneratedBy"]) == 3
    assert [agent["prov:label"] for agent in document["agent"].values()] == ["kvpolicy"]  # the environment is not in it
