"""What `kvp lineage` draws and exports, and the OpenLineage events, of a real pipeline."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from outcomes import catalog
from prov.model import ProvDocument

from storage.openlineage.events import run_uuid
from tests.storage.openlineage_checks import problems


def _lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def events(small_run) -> list[dict[str, Any]]:
    """What the run left in its home."""
    return [
        event
        for path in sorted((small_run.home / "openlineage").glob("*/run-*.jsonl"))
        for event in _lines(path.read_text())
    ]


def test_every_event_of_a_pipeline_is_valid_and_every_run_has_two(small_run, events):
    assert [problem for event in events for problem in problems(event)] == []
    runs = [row for row in catalog(small_run.home).rows("runs") if row["outcome"] == "completed"]
    assert {row["stage"] for row in runs} == {event["job"]["name"] for event in events}
    assert sorted((event["run"]["runId"], event["eventType"]) for event in events) == sorted(
        (run_uuid(row["run_id"]), kind) for row in runs for kind in ("START", "COMPLETE")
    )
    parents = {event["run"]["facets"]["parent"]["run"]["runId"] for event in events}
    assert parents == {row["prefect_flow_run_id"] for row in runs}


def test_the_datasets_of_the_events_are_the_edges_of_the_catalog(small_run, events):
    edges = catalog(small_run.home).rows("edges")
    for role, names in (("input", "inputs"), ("output", "outputs")):
        told = {
            (event["run"]["runId"], dataset["name"])
            for event in events
            if event["eventType"] == "COMPLETE"
            for dataset in event[names]
        }
        assert told == {
            (run_uuid(edge["run_id"]), edge["artifact_id"])
            for edge in edges
            if edge["role"] == role and edge["name"] not in ("code", "environment", "request")
        }
    outputs = [dataset for event in events for dataset in event["outputs"]]
    described = {dataset["name"].rsplit("-", 1)[0] for dataset in outputs if "schema" in dataset["facets"]}
    shards = {"evaluation_shard", "analysis_shard"}
    assert described == {"prompts", "trace_fragment", "trace_snapshot", *shards, "evaluation", "curve"}
    counted = {d["name"].rsplit("-", 1)[0] for d in outputs if "outputStatistics" in d["outputFacets"]}
    assert counted == {"prompts", "trace_fragment", "trace_snapshot", "curve"}


def test_the_command_makes_the_same_events_again(kvp_here, small_run, events):
    again = _lines(kvp_here("openlineage", home=small_run.home).stdout)

    def key(event: dict[str, Any]) -> str:
        return json.dumps(event, sort_keys=True)

    assert sorted(again, key=key) == sorted(events, key=key)
    snapshot = small_run.document["trace_snapshot"]["id"]
    some = _lines(kvp_here("openlineage", snapshot, home=small_run.home).stdout)
    assert {event["job"]["name"] for event in some} == {"prompts", "collect-fragment", "collect"}


def test_pictures_and_provenance_are_files_that_their_readers_take(kvp_here, small_run, tmp_path):
    policy = small_run.document["policy_set"]["id"]
    graph = catalog(small_run.home).lineage(policy)
    for name in ("up.svg", "up.html", "up.prov.json", "up.provn"):
        finished = kvp_here("lineage", policy, "--out", str(tmp_path / name), home=small_run.home)
        assert (finished.code, finished.stdout, finished.stderr) == (0, f"{tmp_path / name}\n", "")
    groups = [e for e in ElementTree.parse(tmp_path / "up.svg").iter() if e.get("data-group")]
    assert 5 < len(groups) < len(graph.nodes)
    assert policy in (tmp_path / "up.html").read_text()
    document = ProvDocument.deserialize(source=str(tmp_path / "up.prov.json"), format="json")
    names = {record.identifier.localpart for record in document.get_records() if record.identifier}
    assert set(graph.nodes) <= names
    assert (tmp_path / "up.provn").read_text().startswith("document\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--out", "a.png"), "expected a name that ends with .svg, .html, .prov.json, .provn"),
        (("--out", "a.json"), "expected a name that ends with"),
        (("--out", "/nowhere/a.svg"), "cannot write /nowhere/a.svg: No such file or directory"),
        (("--out", "a.svg", "--json"), "choose one of --json and --out"),
        (("--up", "--down"), "choose one of --up and --down"),
    ],
)
def test_what_cannot_be_is_one_line(kvp_here, small_run, options, said):
    finished = kvp_here("lineage", small_run.document["policy_set"]["id"], *options, home=small_run.home)
    assert finished.code != 0 and finished.stdout == ""
    assert said in finished.stderr and finished.stderr.count("\n") == 1
    assert not Path("a.svg").exists()


def test_sending_without_a_receiver_is_one_line(kvp_here, small_run):
    finished = kvp_here("openlineage", "--send", home=small_run.home)
    assert finished.code == 1 and "set OPENLINEAGE_URL" in finished.stderr and finished.stderr.count("\n") == 1
