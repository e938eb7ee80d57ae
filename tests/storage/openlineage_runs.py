"""A run with inputs and outputs of every kind that events tell of, and what is left of its events."""

from __future__ import annotations

import json
from typing import Any

from kvpolicy.digests import digest_bytes
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.lineage.artifacts import Artifact
from storage.tables.parquet import write_rows
from tests.storage.conftest import artifact, curve_row

FLOW_RUN = "d70bf81b-2f56-4231-9b4d-7c599ef1e665"
MODEL = Artifact(kind="model", digest=digest_bytes(b"m"), name='a "model" <b>&', uri="file:///models/m%20odel")


def record(catalog: Catalog, home: Home, stage: str = "evaluate", fail: BaseException | None = None) -> str:
    catalog.register(MODEL)
    with catalog.record_run(
        stage=stage,
        stage_key="k" * 64,
        parameters={"budgets": [1, 2], "text": "<&'\""},
        inputs={"model": MODEL.artifact_id, "again": MODEL.artifact_id},
        code_fingerprint="f" * 64,
        seed=3,
        prefect_flow_run_id=FLOW_RUN,
        prefect_task_run_id="task",
    ) as run:
        path = home.prompts / "p.parquet"
        write_rows(path, [{"text": "a", "count": 1}])
        run.output(
            "prompts",
            Artifact(
                kind="prompts",
                digest=digest_bytes(b"p"),
                name="p",
                uri=str(path),
                metadata={"num_samples": 7, "num_bytes": 99},
            ),
        )
        curve = artifact("curve", "c")
        run.output("curve", curve)
        run.append("curves", [curve_row(curve.artifact_id, budget, 0.5) for budget in (64, 128, 256)])
        run.output("traces", Artifact(kind="trace_fragment", digest=digest_bytes(b"t"), name="t", uri="s3://b/x"))
        if fail is not None:
            raise fail
    return run.run_id


def events_in(home: Home) -> list[dict[str, Any]]:
    """All that a reader finds, in the order of the names of its files."""
    files = sorted((home.path / "openlineage").rglob("*"))
    return [json.loads(line) for path in files if path.is_file() for line in path.read_text().splitlines()]
