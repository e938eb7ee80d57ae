"""Reading runs from the catalog, each with the artifacts that it read and made.

Not for walking from run to run (`storage.lineage.graph`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from storage.catalog.catalog import Catalog
from storage.lineage.artifacts import Artifact
from storage.lineage.graph import MADE
from storage.lineage.run_record import RecordedRun
from storage.tables.lance_table import quote


def recorded_runs(catalog: Catalog, run_ids: Collection[str] | None = None) -> list[RecordedRun]:
    """Return runs in the order in which they ended.

    Args:
        catalog: the catalog.
        run_ids: which runs; all of them by default. Ids that the catalog does not have are left out.

    Raises:
        StorageError: if the catalog cannot be read.
    """
    if run_ids is not None and not run_ids:
        return []
    where = None if run_ids is None else f"run_id IN ({', '.join(map(quote, sorted(run_ids)))})"
    edges: dict[str, list[Mapping[str, Any]]] = {}
    for edge in catalog.rows("edges", where):
        edges.setdefault(edge["run_id"], []).append(edge)
    names = sorted({str(edge["artifact_id"]) for of_run in edges.values() for edge in of_run})
    artifacts = dict(zip(names, catalog.artifacts(names), strict=True))
    points = Counter(row["curve_id"] for row in catalog.rows("curves", where, ["curve_id"], outcomes=MADE))

    def of_role(row: Mapping[str, Any], role: str) -> dict[str, Artifact]:
        of_run = edges.get(row["run_id"], [])
        return {edge["name"]: artifacts[edge["artifact_id"]] for edge in of_run if edge["role"] == role}

    return [
        RecordedRun.of_row(row, of_role(row, "input"), of_role(row, "output"), points)
        for row in catalog.rows("runs", where)
    ]
