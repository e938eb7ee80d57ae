"""What tasks run for follows them, is recorded, and is no part of what they compute."""

from pathlib import Path

import pytest
from prefect.context import TagsContext, hydrated_context, serialize_context

from kvpolicy.digests import digest_bytes
from storage.catalog.catalog import Artifact, Catalog, RunRecorder
from storage.home import Home
from storage.lineage.artifacts import request_artifact
from tasks.framework.purpose import Purpose, acting_for, current_purpose
from tasks.framework.stage import Stage, find_completed, run_stage

REQUEST = request_artifact({"seed": 1}, "a request")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    opened = Home.open(tmp_path / "home")
    Catalog(opened).register(REQUEST)
    return opened


STAGE = Stage(name="think", module="tasks.prompts", inputs={}, parameters={"depth": 2}, seed=1)
FOR_REQUEST = Purpose(request_id=REQUEST.artifact_id)


def making(content: bytes):
    def body(run: RunRecorder) -> None:
        run.output("result", Artifact(kind="curve", digest=digest_bytes(content), name="a result"))
        run.append("metrics", [{"policy_set_id": "", "step": 1, "name": "loss", "value": float(len(content))}])

    return body


def test_a_purpose_holds_for_its_block_in_place_of_the_one_around_it():
    assert current_purpose() == Purpose()
    with TagsContext(current_tags={"mine"}), acting_for(FOR_REQUEST):
        assert current_purpose() == FOR_REQUEST
        with acting_for(Purpose(repeats="run-0")):
            assert current_purpose() == Purpose(repeats="run-0")
            assert "mine" in TagsContext.get().current_tags
        assert current_purpose() == FOR_REQUEST
    assert current_purpose() == Purpose()


def test_a_purpose_follows_a_task_to_another_process():
    with acting_for(FOR_REQUEST):
        sent = serialize_context()  # what Prefect hands to workers
    assert current_purpose() == Purpose()
    with hydrated_context({"tags_context": sent["tags_context"]}):
        assert current_purpose() == FOR_REQUEST


def test_the_request_is_an_input_of_runs_and_skips_and_no_part_of_the_key(home):
    key = STAGE.key
    with acting_for(FOR_REQUEST):
        assert STAGE.key == key
        run_stage(home, STAGE, making(b"a"))
        run_stage(home, STAGE, making(b"a"))
    assert run_stage(home, STAGE, making(b"a")).skipped
    ran, skipped, without = Catalog(home).rows("runs")
    asked = {edge["run_id"] for edge in Catalog(home).rows("edges", f"artifact_id = '{REQUEST.artifact_id}'")}
    assert asked == {ran["run_id"], skipped["run_id"]}
    assert (skipped["outcome"], without["outcome"]) == ("skipped", "skipped")
    graph = Catalog(home).lineage(ran["run_id"], "up")
    assert {node.kind for node in graph.nodes.values()} == {"run", "request", "code", "environment"}


def test_a_repetition_runs_in_any_case_and_nothing_finds_it(home):
    first = run_stage(home, STAGE, making(b"a"))
    with acting_for(Purpose(request_id=REQUEST.artifact_id, repeats=first.run_id)):
        assert find_completed(home, STAGE) is None
        again = run_stage(home, STAGE, making(b"another"))
    assert not again.skipped
    assert find_completed(home, STAGE).run_id == first.run_id
    assert run_stage(home, STAGE, making(b"a")).outputs == first.outputs
    catalog = Catalog(home)
    assert {row["run_id"] for row in catalog.rows("metrics")} == {first.run_id}
    assert [row["value"] for row in catalog.rows("metrics", outcomes=("repeated",))] == [7.0]
    assert catalog.sql("SELECT value FROM metrics").to_pylist() == [{"value": 1.0}]
    (row,) = catalog.rows("runs", "outcome = 'repeated'")
    assert (row["run_id"], row["reason"], row["stage_key"]) == (again.run_id, f"repeats {first.run_id}", STAGE.key)
    made = catalog.lineage(again.outputs["result"], "up")
    assert again.run_id in made.nodes  # what a repetition made can be followed all the same
    edges = catalog.sql(f"SELECT run_id FROM edges WHERE artifact_id = '{again.outputs['result']}'").to_pylist()
    assert edges == [{"run_id": again.run_id}]


def test_a_repetition_that_fails_is_a_failed_run(home):
    first = run_stage(home, STAGE, making(b"a"))

    def fail(run: RunRecorder) -> None:
        raise OSError("the disk is full")

    with acting_for(Purpose(repeats=first.run_id)), pytest.raises(OSError, match="full"):
        run_stage(home, STAGE, fail)
    assert Catalog(home).rows("runs")[-1]["outcome"] == "failed"
    assert find_completed(home, STAGE).run_id == first.run_id
