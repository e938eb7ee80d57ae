"""What was asked for, and the newest run of each stage that serves it.

Not for whether these runs are still up to date: that takes the code and the presets of now.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.catalog.catalog import Catalog, CompletedRun
from storage.lineage.artifacts import Artifact
from storage.tables.lance_table import quote

StageName = tuple[str, str]  # a whole stage, and what tells two of one request apart: split, seed or nothing
# Whole stage -> what tells two of one request apart, by the parameters and the seed of the run.
Labels = Mapping[str, Callable[[Mapping[str, Any], int | None], str]]


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """A completed run of a stage.

    Attributes:
        name: which stage of its request it is.
        row: its row in the table `runs`.
        known: what it read and made.
    """

    name: StageName
    row: Mapping[str, Any]
    known: CompletedRun

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Its parameters."""
        return _parameters(self.row)


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """A request and the runs that serve it.

    Attributes:
        artifact: the request.
        runs: stage -> its newest run: the request's own, or else the one whose result a later stage of it read.
    """

    artifact: Artifact
    runs: dict[StageName, StageRun] = field(default_factory=dict)


def recorded_requests(catalog: Catalog, labels: Labels) -> list[RequestRecord]:
    """Return all requests, the oldest first, that any stage was run or skipped for.

    Args:
        catalog: the catalog.
        labels: the whole stages; runs of others, such as parts, are passed over.

    Raises:
        StorageError: if the catalog cannot be read.
    """
    rows = {row["run_id"]: row for row in catalog.rows("runs", f"stage IN ({', '.join(map(quote, labels))})")}
    asked = {
        edge["run_id"]: edge["artifact_id"] for edge in catalog.rows("edges", "role = 'input' AND name = 'request'")
    }
    served: dict[str, list[Mapping[str, Any]]] = {}
    for run_id, row in rows.items():  # in the order of their commits
        run = rows.get(row["reused_run_id"], row)
        if run_id in asked and run["outcome"] == "completed":
            served.setdefault(asked[run_id], []).append(run)
    artifacts = catalog.artifacts(list(served))
    return [
        RequestRecord(artifact=artifact, runs=_newest(catalog, served[artifact.artifact_id], labels))
        for artifact in artifacts
    ]


def mean_seconds(catalog: Catalog, preset: str) -> dict[str, float]:
    """What each stage took on average, of its runs that served requests of a preset; runs of one task count together.

    Raises:
        StorageError: if the catalog cannot be read.
    """
    means = catalog.sql(
        "SELECT stage, sum(seconds) / count(DISTINCT prefect_task_run_id) AS seconds "
        "FROM runs JOIN edges USING (run_id) JOIN artifacts USING (artifact_id) "
        "WHERE outcome = 'completed' AND edges.name = 'request' AND edges.role = 'input' AND kind = 'request' "
        f"AND json_extract_string(metadata_json, '$.config.preset') = {quote(preset)} GROUP BY stage"
    )
    return {row["stage"]: row["seconds"] for row in means.to_pylist()}


def _newest(catalog: Catalog, rows: list[Mapping[str, Any]], labels: Labels) -> dict[StageName, StageRun]:
    """The newest run of each stage; what no run of the request made is followed back from what its runs read."""
    runs: dict[StageName, StageRun] = {}
    for row in reversed(rows):
        run = _stage_run(catalog, row, labels)
        runs.setdefault(run.name, run)
    waiting = list(runs.values())
    while waiting:
        for maker in _makers(catalog, waiting.pop(), labels):
            if maker.name not in runs:
                runs[maker.name] = maker
                waiting.append(maker)
    return runs


def _makers(catalog: Catalog, run: StageRun, labels: Labels) -> Iterator[StageRun]:
    for artifact_id in run.known.inputs.values():
        edges = catalog.rows("edges", f"artifact_id = {quote(artifact_id)} AND role = 'output'", ["run_id"])
        if not edges:
            continue  # no run made it
        names = ", ".join(quote(edge["run_id"]) for edge in edges)
        stages = ", ".join(map(quote, labels))
        where = f"run_id IN ({names}) AND outcome = 'completed' AND stage IN ({stages})"
        for row in catalog.rows("runs", where)[-1:]:
            yield _stage_run(catalog, row, labels)


def _stage_run(catalog: Catalog, row: Mapping[str, Any], labels: Labels) -> StageRun:
    stage = str(row["stage"])
    name = stage, labels[stage](_parameters(row), row["seed"])
    return StageRun(name=name, row=row, known=catalog.completed_run(row))


def _parameters(row: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = json.loads(row["parameters_json"])
    return parameters
