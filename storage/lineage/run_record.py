"""A run with the artifacts that it read and made: what programs outside see of it.

Not for reading runs from the catalog (`storage.catalog.recorded_runs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.lineage.artifacts import Artifact
from storage.lineage.graph import MADE
from storage.lineage.recording import RunRecorder

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

    @classmethod
    def of_row(
        cls, row: Row, inputs: Mapping[str, Artifact], outputs: Mapping[str, Artifact], num_points: Mapping[str, int]
    ) -> RecordedRun:
        """Build a run from its row, what it read, what it made, and the points of all curves.

        Args:
            row: its row in the table `runs`.
            inputs: name -> artifact that it read.
            outputs: name -> artifact that it made, also those of a run that failed while they were written.
            num_points: id of a curve -> points, of this run's curves and others.
        """
        published = outputs if row["outcome"] in MADE else {}
        made = {artifact.artifact_id for artifact in published.values()}
        counts = {name: num_points[name] for name in sorted(made) if name in num_points}
        return cls(row=row, inputs=inputs, outputs=published, num_points=counts)

    @classmethod
    def from_recorder(cls, run: RunRecorder, row: Row, known: Sequence[Artifact]) -> RecordedRun:
        """Build a run that is still in memory.

        Args:
            run: the run.
            row: its row in the table `runs`; before its end as it would be now.
            known: the artifacts that it reads, but for its surroundings.
        """
        artifacts = {artifact.artifact_id: artifact for artifact in (*known, *run.surroundings)}
        inputs = {edge["name"]: artifacts[edge["artifact_id"]] for edge in run.edges(with_outputs=False)}
        num_points = Counter(line["curve_id"] for line in run.result_rows.get("curves", []))
        return cls.of_row(row, inputs, run.outputs, num_points)
