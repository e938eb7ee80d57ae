"""The view of a whole run: what it says of stages that are over, at work and still to come, and that a run keeps it."""

import json
import uuid
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcomes import catalog
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterType
from prefect.client.schemas.sorting import ArtifactSort

from flows.display.run_progress import RunProgress, StageProgress, recorded_progress
from storage.catalog.requests import mean_seconds


def test_every_stage_is_told_and_the_time_that_is_left():
    view = RunProgress(
        stages={
            "collect": StageProgress(total=5),
            "train": StageProgress(total=4, part_s=50.0),
            "evaluate": StageProgress(total=9, part_s=100.0),
        }
    )
    assert view.line(0.0) == "collect 0/5, train 0/4, evaluate 0/9; about 18 min left without collect"
    stage = view.begin("train", 3, 10.0)
    assert view.line(10.0) == "collect there already, train 0/3, evaluate 0/9; about 18 min left"
    stage.done, stage.running, stage.failed = 1, 2, 1
    assert view.line(40.0) == "collect there already, train 1/3 (2 running, 1 failed), evaluate 0/9; about 16 min left"
    assert view.fraction(40.0) == pytest.approx((1 + 1 / 3 + 0) / 3)
    assert StageProgress(total=0, started_at=1.0).told() == "there already"  # its parts were, if it was not
    view.begin("evaluate champion", 2, 50.0)  # not foreseen
    assert view.line(50.0) == "collect there already, train 1/3 (2 running, 1 failed), evaluate there already, " + (
        "evaluate champion 0/2"
    )


@given(counts=st.lists(st.integers(1, 6), min_size=1, max_size=4), pace_s=st.floats(0.01, 1e4), known=st.booleans())
def test_at_a_steady_pace_the_time_left_is_true_and_the_share_grows(counts, pace_s, known):
    part_s = pace_s if known else None
    view = RunProgress(stages={f"s{i}": StageProgress(total=n, part_s=part_s) for i, n in enumerate(counts)})
    now, before = 0.0, 0.0
    for index, count in enumerate(counts):
        stage = view.begin(f"s{index}", count, now)
        for done in range(1, count + 1):
            now += pace_s
            stage.done = done
            assert stage.left_s(now) == pytest.approx(pace_s * (count - done), abs=1e-6)
            share = view.fraction(now)
            assert before <= share + 1e-9 <= 1 + 2e-9
            if known:
                assert share == pytest.approx(now / (pace_s * sum(counts)))
            before = share
    assert before == pytest.approx(1)


def test_a_run_leaves_its_progress_in_prefect(small_run, prefect_here):
    rows = catalog(small_run.home).rows("runs", "outcome = 'completed'")
    with get_client(sync_client=True) as client:
        shown = recorded_progress(client, [uuid.UUID(name) for name in {row["prefect_flow_run_id"] for row in rows}])
    ((retrain, line),) = shown.items()
    tasks = {(row["stage"], row["prefect_task_run_id"]) for row in rows if row["prefect_flow_run_id"] == retrain}
    done = Counter(stage for stage, _ in tasks)
    collected, trained, judged = done["collect-fragment"], done["train-heads"], done["evaluate-shard"]
    judged += done["analyse-shard"]
    assert line.startswith("100 %: ")
    for part in (f"collect {collected}/{collected}", f"train {trained}/{trained}", f"evaluate {judged}/{judged}"):
        assert part in line


def test_what_parts_took_is_asked_of_runs_of_the_same_preset(small_run):
    rows = catalog(small_run.home).rows("runs", "outcome = 'completed'")
    asked = {row["run_id"] for row in catalog(small_run.home).rows("edges", "role = 'input' AND name = 'request'")}
    preset = json.loads(catalog(small_run.home).rows("artifacts", "kind = 'request'")[0]["metadata_json"])["config"]
    found = mean_seconds(catalog(small_run.home), preset["preset"])
    for stage in ("collect-fragment", "train-heads", "evaluate-shard"):
        own = [row for row in rows if row["stage"] == stage and row["run_id"] in asked]
        tasks = {row["prefect_task_run_id"] for row in own}
        assert found[stage] == pytest.approx(sum(row["seconds"] for row in own) / len(tasks))
    assert mean_seconds(catalog(small_run.home), "it's another") == {}


def test_a_run_that_fails_says_where_in_its_line_and_in_prefect(kvp_here, small_run, prefect_here, tmp_path):
    told = kvp_here("run", *small_run.options, "--set", "train.learning_rate=1e30", home=tmp_path)
    rows = catalog(tmp_path).rows("runs", "outcome = 'failed'")
    (run_id,) = (row["run_id"] for row in rows)
    assert told.code == 1
    last = told.stderr.splitlines()[-1]
    assert last.startswith("kvp: train: ")
    assert last.endswith(f"(stage train-heads, run {run_id})")
    assert last.removeprefix("kvp: ") in _newest_page()

    told = kvp_here("run", *small_run.options, "--set", "prompts.length_tokens=100", home=tmp_path)
    last = told.stderr.splitlines()[-1]
    assert "does not fit 100 tokens" in last
    page = _newest_page()  # also of what fails before there is a plan
    assert last.removeprefix("kvp: ") in page
    assert f"- preset `smoke`, seed 0, home `{tmp_path}`" in page


def _newest_page():
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(type=ArtifactFilterType(any_=["markdown"]))
        return client.read_artifacts(artifact_filter=chosen, sort=ArtifactSort.CREATED_DESC)[0].data
