"""Runs as the catalog has them, each with the artifacts that it read and made.

What programs outside are told of runs is built from this alone. Not for walking from run to run (`storage.graph`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage.artifacts import Artifact
from storage.tables import quote

if TYPE_CHECKING:
    from storage.catalog import Catalog

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run and what it read and made.

    Attributes:
        row: its row in the table `runs`.
        inputs: name -> artifact that it read.
        outputs: name -> artifact that it made; none if it failed.
        num_points: id of a curve that it made -> points of the curve.
    """

    row: Row
    inputs: Mapping[str, Artifact]
    outputs: Mapping[str, Artifact]
    num_points: Mapping[str, int]

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return str(self.row["run_id"])


def recorded_runs(catalog: Catalog, run_ids: Collection[str] | None = None) -> list[RecordedRun]:
    """Return runs in the order in which they ended.

    Args:
        catalog: the catalog.
        run_ids: which runs; all of them by default. Ids that the catalog does not have are left out.

    Raises:
        StorageError: if the catalog cannot be read.
    """
    where = None if run_ids is None else f"run_id IN ({', '.join(map(quote, sorted(run_ids)))})"
    if run_ids is not None and not run_ids:
        return []
    edges: dict[str, list[Row]] = {}
    for edge in catalog.rows("edges", where):
        edges.setdefault(edge["run_id"], []).append(edge)
    runs = [(row, edges.get(row["run_id"], [])) for row in catalog.rows("runs", where)]
    made_curves = any(edge["artifact_id"].startswith("curve-") for _, of_run in runs for edge in of_run)
    points = catalog.rows("curves", where, ["curve_id"]) if made_curves else []
    return with_artifacts(catalog, runs, Counter(str(row["curve_id"]) for row in points))


def with_artifacts(
    catalog: Catalog, runs: Sequence[tuple[Row, Sequence[Row]]], num_points: Mapping[str, int] | None = None
) -> list[RecordedRun]:
    """Put rows of `runs`, each with its rows of `edges`, together with their artifacts.

    Raises:
        StorageError: if an artifact is not registered.
    """
    names = sorted({str(edge["artifact_id"]) for _, edges in runs for edge in edges})
    artifacts = dict(zip(names, catalog.artifacts(names), strict=True))

    def of_role(row: Row, edges: Sequence[Row], role: str) -> dict[str, Artifact]:
        # A run may fail while its outputs are written down: these were never published.
        counts = role == "input" or row["outcome"] != "failed"
        return {edge["name"]: artifacts[edge["artifact_id"]] for edge in edges if edge["role"] == role and counts}

    counts = num_points or {}
    found = []
    for row, edges in runs:
        outputs = of_role(row, edges, "output")
        made = {artifact.artifact_id for artifact in outputs.values()}
        found.append(
            RecordedRun(
                row=row,
                inputs=of_role(row, edges, "input"),
                outputs=outputs,
                num_points={name: counts[name] for name in counts if name in made},
            )
        )
    return found
