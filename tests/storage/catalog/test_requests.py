"""Which run of each stage serves a request, whatever made it."""

from __future__ import annotations

from typing import Any

import pytest

from storage.catalog.catalog import Catalog
from storage.catalog.requests import RequestRecord, StageName, recorded_requests
from storage.catalog.run_differences import compare_runs, find_run
from storage.lineage.artifacts import request_artifact
from tests.storage.conftest import artifact

FIRST, SECOND = (request_artifact({"seed": seed}, f"seed {seed}") for seed in (1, 2))
PROMPTS, SNAPSHOT, POLICY = artifact("prompts", "p"), artifact("trace_snapshot", "s"), artifact("policy_set", "p")
_MADE = {"prompts": PROMPTS, "collect": SNAPSHOT, "train": POLICY, "train-heads": artifact("head_group", "g")}

LABELS = {
    "prompts": lambda parameters, seed: parameters["split"],
    "collect": lambda parameters, seed: "",
    "train": lambda parameters, seed: f"seed {seed}",
}


@pytest.fixture
def asked(catalog: Catalog) -> Catalog:
    for request in (FIRST, SECOND):
        catalog.register(request)
    return catalog


def run(catalog: Catalog, stage: str, *, request: str = "", **changes: Any) -> str:
    parameters = {"split": "train"} if stage == "prompts" else {}
    inputs = changes.pop("inputs", {}) | ({"request": request} if request else {})
    arguments = {"stage": stage, "stage_key": stage, "parameters": parameters, "code_fingerprint": "f" * 64, "seed": 0}
    with catalog.record_run(inputs=inputs, **{**arguments, **changes}) as recorder:
        recorder.output("made", _MADE[stage])
    return recorder.run_id


def runs(record: RequestRecord) -> dict[StageName, str]:
    return {name: found.known.run_id for name, found in record.runs.items()}


def test_the_newest_run_of_each_stage_counts_and_parts_and_repetitions_do_not(asked: Catalog) -> None:
    old, new = (run(asked, "train", request=FIRST.artifact_id) for _ in range(2))
    run(asked, "train-heads", request=FIRST.artifact_id)
    run(asked, "train", request=FIRST.artifact_id, repeats=old)
    prompts = run(asked, "prompts", request=FIRST.artifact_id)
    run(asked, "collect")  # nobody's
    (record,) = recorded_requests(asked, LABELS)
    assert record.artifact == FIRST
    assert runs(record) == {("train", "seed 0"): new, ("prompts", "train"): prompts}


def test_what_was_skipped_or_read_is_followed_to_the_run_that_made_it(asked: Catalog) -> None:
    prompts = run(asked, "prompts", request=FIRST.artifact_id)
    collected = run(asked, "collect", request=FIRST.artifact_id, inputs={"prompts_train": PROMPTS.artifact_id})
    trained = run(asked, "train", request=SECOND.artifact_id, inputs={"snapshot": SNAPSHOT.artifact_id})
    asked.record_skip(stage="train", stage_key="train", reused_run_id=trained, request_id=FIRST.artifact_id)
    first, second = recorded_requests(asked, LABELS)
    expected = {("prompts", "train"): prompts, ("collect", ""): collected, ("train", "seed 0"): trained}
    assert (first.artifact, second.artifact) == (FIRST, SECOND)
    assert runs(first) == runs(second) == expected


def test_what_was_registered_by_hand_leads_to_no_run(asked: Catalog) -> None:
    asked.register(SNAPSHOT)
    trained = run(asked, "train", request=FIRST.artifact_id, inputs={"snapshot": SNAPSHOT.artifact_id})
    (record,) = recorded_requests(asked, LABELS)
    assert runs(record) == {("train", "seed 0"): trained}


def test_without_requests_there_is_nothing_to_ask_about(asked: Catalog) -> None:
    run(asked, "train")
    assert recorded_requests(asked, LABELS) == []


def test_a_repetition_is_compared_as_any_run_and_stands_for_nothing(asked: Catalog) -> None:
    original = run(asked, "train", modules={"kvpolicy.training.policy_training": "a" * 64})
    again = run(
        asked,
        "train",
        repeats=original,
        modules={"kvpolicy.training.policy_training": "b" * 64},
        code_fingerprint="e" * 64,
    )
    found = {(difference.kind, difference.name) for difference in compare_runs(asked, original, again)}
    assert found == {("code", "code_fingerprint"), ("code", "module kvpolicy.training.policy_training")}
    assert find_run(asked, POLICY.artifact_id)["run_id"] == original
    assert find_run(asked, again)["run_id"] == again


def test_requests_are_no_difference_between_runs(asked: Catalog) -> None:
    first, second = (run(asked, "train", request=request.artifact_id) for request in (FIRST, SECOND))
    assert compare_runs(asked, first, second) == []
