from __future__ import annotations

from typing import Any

import pytest

from storage.catalog.catalog import Catalog
from storage.catalog.run_differences import Difference, compare_runs
from storage.errors import StorageError
from tests.storage.conftest import artifact, curve_row

MODEL, OTHER_MODEL = artifact("model", "m"), artifact("model", "n")


def record(catalog: Catalog, name: str, value: float, **changes: Any) -> str:
    for model in (MODEL, OTHER_MODEL):
        catalog.register(model)
    arguments: dict[str, Any] = {
        "stage": "evaluate",
        "stage_key": name,
        "parameters": {"evaluate": {"budgets": [64, 128], "num_samples": 3}},
        "inputs": {"model": MODEL.artifact_id},
        "code_fingerprint": "f" * 64,
        "seed": 0,
    }
    with catalog.record_run(**{**arguments, **changes}) as run:
        curve_id = run.output("curve", artifact("curve", name))
        run.append(
            "curves", [curve_row(curve_id, 64, value, method="kvp"), curve_row(curve_id, 128, 0.1, method="kvp")]
        )
    return run.run_id


def test_equal_runs_do_not_differ(catalog: Catalog) -> None:
    first, second = record(catalog, "a", 0.5), record(catalog, "b", 0.5)
    assert compare_runs(catalog, first, second) == []
    assert compare_runs(catalog, first, first) == []


def test_each_difference_is_named_and_nothing_else(catalog: Catalog) -> None:
    first = record(catalog, "a", 0.5)
    second = record(
        catalog,
        "b",
        0.25,
        parameters={"evaluate": {"budgets": [64, 128], "num_samples": 4}, "dtype": "bfloat16"},
        inputs={"model": OTHER_MODEL.artifact_id},
        code_fingerprint="e" * 64,
        seed=1,
    )
    found = compare_runs(catalog, first, second)
    curve = next(difference.name for difference in found if difference.kind == "result")
    assert curve.startswith("curves kvp ")
    assert found == [
        Difference(kind="input", name="model", first=MODEL.artifact_id, second=OTHER_MODEL.artifact_id),
        Difference(kind="parameter", name="evaluate.num_samples", first=3, second=4),
        Difference(kind="seed", name="seed", first=0, second=1),
        Difference(kind="code", name="code_fingerprint", first="f" * 64, second="e" * 64),
        Difference(kind="result", name=curve, first=0.5, second=0.25),
        Difference(kind="parameter", name="dtype", first=None, second="bfloat16"),
    ]
    mirrored = compare_runs(catalog, second, first)
    assert {(d.kind, d.name, d.second, d.first) for d in mirrored} == {
        (d.kind, d.name, d.first, d.second) for d in found
    }


def test_what_a_run_made_stands_for_it(catalog: Catalog) -> None:
    first, second = record(catalog, "a", 0.5), record(catalog, "b", 0.25)
    by_curve = compare_runs(catalog, artifact("curve", "a").artifact_id, artifact("curve", "b").artifact_id)
    assert by_curve == compare_runs(catalog, first, second) != []
    with pytest.raises(StorageError, match="no run made model-"):
        compare_runs(catalog, MODEL.artifact_id, first)
    with pytest.raises(StorageError, match="no artifact, run or MLflow run"):
        compare_runs(catalog, "run-0000000000000000", first)
