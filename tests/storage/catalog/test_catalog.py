from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pytest

from kvpolicy.errors import InputError
from storage.catalog.catalog import Catalog, RunRecorder
from storage.errors import StorageError
from storage.home import Home
from storage.lineage.artifacts import Artifact
from storage.tables.lance_table import compaction
from storage.tables.schemas import TABLES
from tests.storage.conftest import artifact, curve_row

MODEL = artifact("model", "m")
CURVE = artifact("curve", "c")


def record(catalog: Catalog, **changes: Any) -> AbstractContextManager[RunRecorder]:
    catalog.register(MODEL)
    arguments: dict[str, Any] = {
        "stage": "evaluate",
        "stage_key": "k" * 64,
        "parameters": {"budgets": [1, 2]},
        "inputs": {"model": MODEL.artifact_id},
        "code_fingerprint": "f" * 64,
        "seed": 3,
        "prefect_flow_run_id": "flow",
        "prefect_task_run_id": "task",
    }
    return catalog.record_run(**{**arguments, **changes})


def test_a_completed_run_publishes_all_it_made(catalog: Catalog) -> None:
    with record(catalog) as run:
        assert run.output("curve", CURVE) == CURVE.artifact_id
        assert run.output("curve", CURVE) == CURVE.artifact_id
        run.append("curves", [curve_row(CURVE.artifact_id, budget, 0.5) for budget in (64, 128)])
        run.append("curves", [curve_row(CURVE.artifact_id, 256, 0.1, ci_low=0.0, ci_high=0.2)])
        run.mlflow_run_id = "mlflow"
        assert catalog.rows("curves") == catalog.rows("runs") == []  # nothing until it has succeeded
        assert catalog.find_completed("k" * 64) is None
    (row,) = catalog.rows("runs")
    assert (row["outcome"], row["reason"], row["seed"], row["mlflow_run_id"]) == ("completed", "", 3, "mlflow")
    assert (row["prefect_flow_run_id"], row["prefect_task_run_id"]) == ("flow", "task")
    assert row["parameters_json"] == '{"budgets":[1,2]}'
    assert row["ended_at"] >= row["started_at"] and row["seconds"] >= 0
    curves = catalog.rows("curves", "budget > 100", ["run_id", "budget", "ci_low"])
    assert curves == [
        {"run_id": run.run_id, "budget": 128, "ci_low": None},
        {"run_id": run.run_id, "budget": 256, "ci_low": 0.0},
    ]
    found = catalog.find_completed("k" * 64)
    assert found is not None
    assert (found.run_id, found.outputs, found.mlflow_run_id) == (run.run_id, {"curve": CURVE.artifact_id}, "mlflow")
    assert catalog.artifact(CURVE.artifact_id) == CURVE
    environment = catalog.artifact(row["environment_id"])
    assert environment.metadata["packages"]["zarr"]
    edges = {(edge["role"], edge["name"]) for edge in catalog.rows("edges")}
    assert edges == {("input", "model"), ("input", "code"), ("input", "environment"), ("output", "curve")}


def test_a_failed_run_is_a_row_with_its_reason_and_nothing_else(catalog: Catalog) -> None:
    with pytest.raises(RuntimeError, match="out of"), record(catalog) as run:
        run.output("curve", CURVE)
        run.append("curves", [curve_row(CURVE.artifact_id, 64, 0.5)])
        raise RuntimeError("out of memory\nwith details")
    (row,) = catalog.rows("runs")
    assert (row["outcome"], row["reason"]) == ("failed", "RuntimeError: out of memory")
    assert catalog.rows("curves") == []
    assert catalog.find_completed("k" * 64) is None
    with pytest.raises(StorageError, match="no artifact"):
        catalog.artifact(CURVE.artifact_id)
    assert {edge["role"] for edge in catalog.rows("edges")} == {"input"}


def test_an_interrupted_run_is_recorded_too(catalog: Catalog) -> None:
    with pytest.raises(KeyboardInterrupt), record(catalog):
        raise KeyboardInterrupt
    assert catalog.rows("runs", columns=["outcome", "reason"]) == [
        {"outcome": "failed", "reason": "KeyboardInterrupt: KeyboardInterrupt"}
    ]


def test_an_interrupt_after_the_record_does_not_make_it_a_failure(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with record(catalog):
        pass
    run = record(catalog, stage_key="a" * 64)
    merge_files = compaction.merge_files

    def interrupted(dataset: Any, *, all_files: bool) -> None:
        merge_files(dataset, all_files=all_files)
        if dataset.uri.endswith("runs.lance"):
            raise KeyboardInterrupt

    monkeypatch.setattr("storage.tables.lance_table._FILES_AT_MOST", 1)
    monkeypatch.setattr(compaction, "merge_files", interrupted)
    with pytest.raises(KeyboardInterrupt), run:
        pass
    assert [row["outcome"] for row in catalog.rows("runs")] == ["completed", "completed"]
    assert catalog.find_completed("a" * 64) is not None


def test_results_of_a_writer_that_died_half_way_are_invisible(catalog: Catalog, home: Home) -> None:
    with record(catalog) as run:
        run.append("curves", [curve_row(CURVE.artifact_id, 64, 0.5)])
    # What is on disk before the last append, the row in `runs`.
    catalog.append("curves", [curve_row(CURVE.artifact_id, 64, 0.7, run_id="run-dead")])
    assert [row["value"] for row in catalog.rows("curves")] == [0.5]
    assert catalog.sql("SELECT value FROM curves").to_pylist() == [{"value": 0.5}]


def test_a_record_that_cannot_be_finished_is_a_failed_run(catalog: Catalog, home: Home) -> None:
    catalog.register(MODEL)
    (home.catalog / "scores.lance").write_text("in the way")
    score = {"evaluation_id": "e", "sample_id": "s", "task": "t", "setting": "query_aware", "method": "kvp"}
    score |= {"seed": 0, "budget": 64, "metric": "kl", "value": 0.1}
    with pytest.raises(StorageError, match="table scores"), record(catalog) as run:
        run.append("curves", [curve_row(CURVE.artifact_id, 64, 0.5)])
        run.append("scores", [score])
    assert [row["outcome"] for row in catalog.rows("runs")] == ["failed"]
    assert catalog.rows("curves") == []


def test_a_skip_points_to_what_it_used(catalog: Catalog) -> None:
    with record(catalog) as run:
        run.output("curve", CURVE)
    skipped = catalog.record_skip(stage="evaluate", stage_key="k" * 64, reused_run_id=run.run_id, seed=3)
    (row,) = catalog.rows("runs", "outcome = 'skipped'")
    assert (row["run_id"], row["reused_run_id"]) == (skipped, run.run_id)
    assert run.run_id in row["reason"]
    found = catalog.find_completed("k" * 64)
    assert found is not None and found.run_id == run.run_id
    assert catalog.lineage(skipped).root == run.run_id


def test_the_latest_completed_run_is_found(catalog: Catalog) -> None:
    for name in ("one", "two"):
        with record(catalog) as run:
            run.output("curve", artifact("curve", name))
    found = catalog.find_completed("k" * 64)
    assert found is not None and found.outputs == {"curve": artifact("curve", "two").artifact_id}
    assert catalog.find_completed("other") is None


def test_registering_again_changes_nothing(catalog: Catalog) -> None:
    with ThreadPoolExecutor(6) as pool:
        ids = list(pool.map(lambda _: catalog.register(MODEL), range(6)))
    assert set(ids) == {MODEL.artifact_id}
    assert catalog.sql("SELECT count(*) AS n FROM artifacts").to_pylist() == [{"n": 1}]
    before = len(catalog.rows("artifacts"))
    catalog.register(Artifact(kind="model", digest=MODEL.digest, name="renamed"))
    assert len(catalog.rows("artifacts")) == before
    assert catalog.artifact(MODEL.artifact_id).name == "m"


def test_models_are_listed_once(catalog: Catalog) -> None:
    row = {"model_id": "model-1", "name": "n", "source": "s", "revision": "", "digest": "d", "architecture": "llama"}
    row |= {"num_layers": 1, "num_query_heads": 1, "num_kv_heads": 1, "head_dim": 1, "max_positions": 1}
    catalog.append("models", [row])
    catalog.append("models", [row, {**row, "model_id": "model-2"}])
    assert [row["model_id"] for row in catalog.rows("models")] == ["model-1", "model-2"]


def test_bad_calls_are_one_line_and_record_nothing(catalog: Catalog) -> None:
    unknown = {"traces": "trace_snapshot-1"}
    with pytest.raises(StorageError, match=r"input 'traces' is .* no such artifact"), record(catalog, inputs=unknown):
        pass
    with pytest.raises(StorageError, match="leave it out"), record(catalog, inputs={"code": MODEL.artifact_id}):
        pass
    with pytest.raises(InputError, match=r"\$.x is a set"), record(catalog, parameters={"x": {1}}):
        pass
    assert catalog.rows("runs") == []
    with pytest.raises(StorageError, match="no table 'curve'"):
        catalog.rows("curve")
    with pytest.raises(StorageError, match="expected small letters and underscores"):
        artifact("Some file", "x")
    with pytest.raises(StorageError, match="hexadecimal"):
        Artifact(kind="model", digest="short", name="x")


def test_bad_rows_fail_where_they_are_handed_over(catalog: Catalog) -> None:
    with pytest.raises(StorageError, match="no value for value"), record(catalog) as run:
        row = curve_row(CURVE.artifact_id, 1, 0.0)
        del row["value"]
        run.append("curves", [row])
    with pytest.raises(StorageError, match="no table of results 'runs'"), record(catalog) as run:
        run.append("runs", [])
    with pytest.raises(StorageError, match="has an output 'curve' already"), record(catalog) as run:
        run.output("curve", CURVE)
        run.output("curve", artifact("curve", "other"))
    assert [row["outcome"] for row in catalog.rows("runs")] == ["failed"] * 3


def test_every_column_is_described_and_flat() -> None:
    for name, schema in TABLES.items():
        assert schema.metadata[b"description"], name
        for field in schema:
            assert field.metadata[b"description"], f"{name}.{field.name}"
            assert not pa.types.is_nested(field.type)


def test_times_are_those_of_utc_wherever_it_is_read(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time()
    artifact_id = catalog.register(artifact("model", "timed"))
    after = time.time()
    for zone in ("Asia/Tokyo", "America/Lima", "UTC"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert before * 1000 - 1 <= catalog.created_at_ms(artifact_id) <= after * 1000 + 1
    monkeypatch.undo()
    time.tzset()
