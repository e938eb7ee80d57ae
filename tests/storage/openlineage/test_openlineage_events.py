"""OpenLineage's events: they are valid, and are made of what the catalog says of a run."""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from kvpolicy.digests import digest_bytes
from storage.catalog.catalog import Catalog
from storage.catalog.recorded_runs import recorded_runs
from storage.home import Home
from storage.openlineage.delivery import event_lines
from storage.openlineage.events import run_events, run_uuid
from tests.storage.conftest import artifact, curve_row
from tests.storage.openlineage_checks import problems
from tests.storage.openlineage_runs import FLOW_RUN, MODEL, events_in, record

pytestmark = pytest.mark.usefixtures("no_receiver")


def test_a_run_leaves_valid_events_that_say_what_the_catalog_says(catalog: Catalog, home: Home) -> None:
    run_id = record(catalog, home)
    start, end = events_in(home)
    assert [problem for event in (start, end) for problem in problems(event)] == []
    assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
    (row,) = catalog.rows("runs")
    assert (start["eventTime"], end["eventTime"]) == tuple(
        row[name].isoformat(timespec="microseconds") + "Z" for name in ("started_at", "ended_at")
    )
    assert start["run"]["runId"] == end["run"]["runId"] == run_uuid(run_id)
    assert (end["job"]["namespace"], end["job"]["name"]) == ("kvpolicy", "evaluate")
    assert end["run"]["facets"]["parent"]["run"]["runId"] == FLOW_RUN
    stage = end["run"]["facets"]["kvpolicy_stage"]
    assert (stage["catalogRunId"], stage["stageKey"], stage["seed"]) == (run_id, "k" * 64, 3)
    assert stage["parameters"] == {"budgets": [1, 2], "text": "<&'\""}
    assert end["job"]["facets"]["sourceCodeLocation"]["version"] == row["git_commit"]
    # A dataset once, whatever it is to the run; code and environment are facets.
    assert [entry["name"] for entry in end["inputs"]] == [MODEL.artifact_id]
    assert stage["inputs"]["again"] == MODEL.artifact_id
    made = {entry["name"].split("-")[0]: entry for entry in end["outputs"]}
    assert set(made) == {"prompts", "curve", "trace_fragment"}
    assert made["prompts"]["facets"]["version"]["datasetVersion"] == digest_bytes(b"p")
    assert (
        made["prompts"]["outputFacets"]["outputStatistics"] | {"rowCount": 7, "size": 99}
        == (made["prompts"]["outputFacets"]["outputStatistics"])
    )
    assert made["curve"]["outputFacets"]["outputStatistics"]["rowCount"] == 3
    assert made["trace_fragment"]["facets"]["dataSource"]["uri"] == "s3://b/x"
    fields = {kind: [field["name"] for field in entry["facets"]["schema"]["fields"]] for kind, entry in made.items()}
    assert fields["prompts"] == ["text", "count"]
    assert fields["trace_fragment"] == ["keys", "values", "importance"]
    assert "ci_low" in fields["curve"]


def test_the_same_events_are_made_of_the_catalog_alone(catalog: Catalog, home: Home) -> None:
    record(catalog, home)
    with pytest.raises(RuntimeError):
        record(catalog, home, "train", RuntimeError("out of memory\nand more"))
    lines = [event_lines(run_events(recorded)) for recorded in recorded_runs(Catalog(home))]
    written = [path.read_text() for path in (home.path / "openlineage").rglob("*.jsonl")]
    assert sorted(lines) == sorted(written)
    assert recorded_runs(catalog, ["run-unknown"]) == recorded_runs(catalog, []) == []


def test_a_failed_run_says_why_and_claims_no_output(catalog: Catalog, home: Home) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        record(catalog, home, fail=RuntimeError("out of memory\nand more"))
    start, end = events_in(home)
    assert problems(start) + problems(end) == []
    assert (start["eventType"], end["eventType"]) == ("START", "FAIL")
    assert end["outputs"] == []
    error = end["run"]["facets"]["errorMessage"]
    assert (error["message"], error["programmingLanguage"]) == ("RuntimeError: out of memory", "PYTHON")


def test_a_skipped_run_has_no_events(catalog: Catalog, home: Home) -> None:
    run_id = record(catalog, home)
    before = events_in(home)
    catalog.record_skip(stage="evaluate", stage_key="k" * 64, reused_run_id=run_id)
    assert events_in(home) == before
    assert [len(run_events(recorded)) for recorded in recorded_runs(catalog)] == [2, 0]


def test_a_repeated_run_has_made_what_it_made(catalog: Catalog, home: Home) -> None:
    run_id = record(catalog, home)
    catalog_run = catalog.record_run(
        stage="evaluate", stage_key="k" * 64, parameters={}, inputs={}, code_fingerprint="f", repeats=run_id
    )
    with catalog_run as run:
        run.output("curve", artifact("curve", "c"))
        run.append("curves", [curve_row(artifact("curve", "c").artifact_id, 64, 0.5)])
    (path,) = (home.path / "openlineage").glob(f"*/{run.run_id}.jsonl")
    start, end = map(json.loads, path.read_text().splitlines())
    assert problems(start) + problems(end) == []
    assert (end["eventType"], end["run"]["facets"]["kvpolicy_stage"]["outcome"]) == ("COMPLETE", "repeated")
    assert end["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 1
    (recorded,) = recorded_runs(catalog, [run.run_id])
    assert event_lines(run_events(recorded)) == path.read_text()


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(event: dict[str, Any]) -> None:
        place: Any = event
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("eventTime", to="yesterday"),
        _set("eventType", to="FINISHED"),
        _set("run", "runId", to="run-0123456789abcdef"),
        _set("producer", to="no uri"),
        _set("job", to={"name": "evaluate"}),
        _set("inputs", 0, "facets", "version", "datasetVersion", to=3),
        _set("inputs", 0, "facets", "version", "_producer", to=None),
        _set("outputs", 0, "outputFacets", "outputStatistics", "rowCount", to="many"),
        _set("run", "facets", "kvpolicy_stage", "stageKey", to=""),
        _set("run", "facets", "kvpolicy_stage", "seed", to="three"),
        _set("job", "facets", "sourceCodeLocation", "url", to="not-a-url"),
    ],
)
def test_a_wrong_event_is_noticed(catalog: Catalog, home: Home, change: Callable[[dict[str, Any]], None]) -> None:
    record(catalog, home)
    event = events_in(home)[1]
    wrong = copy.deepcopy(event)
    change(wrong)
    assert problems(event) == []
    assert problems(wrong)


def test_ids_of_runs_are_uuids_that_never_change() -> None:
    assert run_uuid("run-0123456789abcdef") == "230de9a5-300e-529b-99f6-ef00b5be58d4"
    assert uuid.UUID(run_uuid("run-1")).version == 5
    assert run_uuid("run-1") != run_uuid("run-2")
