"""Runs as the catalog has them, each with the artifacts that it read and made.

What programs outside are told of runs is built from this alone. Not for walking from run to run (`storage.graph`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage.artifacts import Artifact
from storage.graph import MADE
from storage.tables import quote

if TYPE_CHECKING:
    from storage.catalog import Catalog
    from storage.recording import RunRecorder

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
    if run_ids is not None and not run_ids:
        return []
    where = None if run_ids is None else f"run_id IN ({', '.join(map(quote, sorted(run_ids)))})"
    edges: dict[str, list[Row]] = {}
    for edge in catalog.rows("edges", where):
        edges.setdefault(edge["run_id"], []).append(edge)
    names = sorted({str(edge["artifact_id"]) for of_run in edges.values() for edge in of_run})
    artifacts = dict(zip(names, catalog.artifacts(names), strict=True))
    points = Counter(row["curve_id"] for row in catalog.rows("curves", where, ["curve_id"], outcomes=MADE))

    def of_role(row: Row, role: str) -> dict[str, Artifact]:
        of_run = edges.get(row["run_id"], [])
        return {edge["name"]: artifacts[edge["artifact_id"]] for edge in of_run if edge["role"] == role}

    return [
        _recorded(row, of_role(row, "input"), of_role(row, "output"), points) for row in catalog.rows("runs", where)
    ]


def in_hand(run: RunRecorder, row: Row, known: Sequence[Artifact]) -> RecordedRun:
    """Return a run of this process as `recorded_runs` will, without reading it back.

    Args:
        run: the run.
        row: its row in the table `runs`; before its end as it would be now.
        known: the artifacts that it reads, but for its surroundings.
    """
    artifacts = {artifact.artifact_id: artifact for artifact in (*known, *run.surroundings)}
    inputs = {edge["name"]: artifacts[edge["artifact_id"]] for edge in run.edges(with_outputs=False)}
    return _recorded(row, inputs, run.outputs, Counter(line["curve_id"] for line in run.result_rows.get("curves", [])))


def _recorded(
    row: Row, inputs: Mapping[str, Artifact], outputs: Mapping[str, Artifact], points: Mapping[str, int]
) -> RecordedRun:
    published = outputs if row["outcome"] in MADE else {}  # a run may fail while its outputs are written down
    made = {artifact.artifact_id for artifact in published.values()}
    counts = {name: points[name] for name in sorted(made) if name in points}
    return RecordedRun(row=row, inputs=inputs, outputs=published, num_points=counts)
