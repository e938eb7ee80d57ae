"""The catalog: every run, what it read and made, and its results, in append-only Lance tables.

A run's rows are written after it has succeeded, and its row in `runs` comes last: that row is the commit. Rows of runs
that are not in `runs`, left by a writer that died half-way, are invisible to every reader here, and so are results of
runs that failed while they were being written.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpolicy.digests import canonical_json
from storage.environment import environment
from storage.errors import StorageError
from storage.home import Home
from storage.lineage.artifacts import Artifact
from storage.lineage.graph import LineageGraph, walk
from storage.lineage.recording import RunRecorder, fill_in, new_run_id, utc_now
from storage.openlineage.delivery import announced
from storage.tables.lance_table import Table, quote
from storage.tables.schemas import INDEXED, TABLES, UNIQUE

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Artifact", "Catalog", "CompletedRun", "RunRecorder"]


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """A run whose results can be used again.

    Attributes:
        run_id: the run.
        mlflow_run_id: its MLflow run; "" if none.
        ended_at: when it ended, UTC.
        inputs: name -> artifact id.
        outputs: name -> artifact id.
    """

    run_id: str
    mlflow_run_id: str
    ended_at: dt.datetime
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


class Catalog:
    """The catalog of a home. Any number of processes may use it at once."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._tables = {
            name: Table(
                name=name,
                uri=str(home.catalog / f"{name}.lance"),
                schema=schema,
                indexed=INDEXED.get(name, ()),
            )
            for name, schema in TABLES.items()
        }

    @contextmanager
    def record_run(
        self,
        *,
        stage: str,
        stage_key: str,
        parameters: Mapping[str, Any],
        inputs: Mapping[str, str],
        code_fingerprint: str,
        seed: int | None = None,
        prefect_flow_run_id: str = "",
        prefect_task_run_id: str = "",
        modules: Mapping[str, str] | None = None,
        repeats: str = "",
        shared_by: int = 1,
    ) -> Iterator[RunRecorder]:
        """Record the run that the block is.

        If the block ends, its outputs and rows are registered together. If it raises, only a failed run with the
        reason and the inputs is, and the exception goes on. The code and the environment are inputs by themselves. Its
        start and end are told as OpenLineage's events.

        Args:
            stage: name of the stage.
            stage_key: its key (`storage.fingerprints.stage_key`).
            parameters: its parameters as JSON values.
            inputs: role -> id of a registered artifact.
            code_fingerprint: fingerprint of its code (`storage.fingerprints.ProjectCode`).
            seed: its seed.
            prefect_flow_run_id: Prefect flow run.
            prefect_task_run_id: Prefect task run.
            modules: what the fingerprint covers: module -> digest of its source.
            repeats: id of the run that this one repeats: its results are kept to be compared; no stage finds them and
                no table shows them.
            shared_by: number of runs that do their work together: each has an equal share of the seconds.

        Raises:
            StorageError: if an input is not registered, or the record cannot be written.
        """
        known = self._require_artifacts(inputs)
        run = RunRecorder(
            stage=stage,
            stage_key=stage_key,
            parameters=parameters,
            inputs=inputs,
            code_fingerprint=code_fingerprint,
            seed=seed,
            prefect_flow_run_id=prefect_flow_run_id,
            prefect_task_run_id=prefect_task_run_id,
            environment=environment(),
            modules=modules or {},
            repeats=repeats,
            shared_by=shared_by,
        )
        with announced(self._home, run, known, committed=lambda: self.rows("runs", f"run_id = {quote(run.run_id)}")):
            try:
                yield run
                self._write_completed(run)
            except BaseException as failure:
                try:
                    self._write_failed(run, failure)
                except StorageError as error:
                    failure.add_note(f"the failed run could not be recorded either: {error}")
                raise

    def _write_completed(self, run: RunRecorder) -> None:
        for table, rows in run.result_rows.items():
            self.append(table, rows)
        self._register([*run.surroundings, *run.outputs.values()])
        self._tables["edges"].append(run.edges(with_outputs=True))
        self._tables["runs"].append([run.row()])

    def _write_failed(self, run: RunRecorder, failure: BaseException) -> None:
        if self._tables["runs"].scan(f"run_id = {quote(run.run_id)}", ["run_id"]).num_rows:
            return  # an interrupt that came when all was recorded, while files were being merged
        self._register(run.surroundings)
        self._tables["edges"].append(run.edges(with_outputs=False))
        self._tables["runs"].append([run.row(failure)])

    def record_skip(
        self,
        *,
        stage: str,
        stage_key: str,
        reused_run_id: str,
        parameters: Mapping[str, Any] | None = None,
        seed: int | None = None,
        code_fingerprint: str = "",
        prefect_flow_run_id: str = "",
        prefect_task_run_id: str = "",
        request_id: str = "",
    ) -> str:
        """Record that a stage was not run because a completed run has the same key, and return the new run id.

        What it would have read is known from the run that it stands on; of its own it has the request, if one is given.

        Raises:
            StorageError: if it cannot be written.
        """
        run_id, now, around = new_run_id(), utc_now(), environment()
        row = {
            "run_id": run_id,
            "stage": stage,
            "stage_key": stage_key,
            "outcome": "skipped",
            "reason": f"{reused_run_id} has the same key",
            "reused_run_id": reused_run_id,
            "parameters_json": canonical_json(parameters or {}),
            "seed": seed,
            "git_commit": around.git_commit,
            "git_dirty": around.git_dirty,
            "environment_id": "",
            "code_fingerprint": code_fingerprint,
            "hardware": around.hardware,
            "started_at": now,
            "ended_at": now,
            "seconds": 0.0,
            "prefect_flow_run_id": prefect_flow_run_id,
            "prefect_task_run_id": prefect_task_run_id,
            "mlflow_run_id": "",
        }
        if request_id:
            edge = {"run_id": run_id, "artifact_id": request_id, "role": "input", "name": "request"}
            self._tables["edges"].append([edge])
        self._tables["runs"].append([row])
        return run_id

    def register(self, artifact: Artifact) -> str:
        """Register an artifact that no run here made, such as a model; again is no change. Returns its id.

        Raises:
            StorageError: if it cannot be written.
        """
        self._register([artifact])
        return artifact.artifact_id

    def _register(self, artifacts: Sequence[Artifact]) -> None:
        rows = [artifact.to_row() for artifact in artifacts]
        self.append("artifacts", [{**row, "uri": self._home.to_uri(row["uri"])} for row in rows])

    def append(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to a table in one commit; artifacts and models that are there already are left out.

        Rows of results belong to a run: use `RunRecorder.append`, which fills in the run and waits for its success.

        Raises:
            StorageError: if there is no such table, a row does not fit it, or it cannot be written.
        """
        filled = fill_in(self._table(table).name, rows)
        column = UNIQUE.get(table)
        if column is not None and filled:
            to_write = {row.get(column): row for row in filled}
            present = {row[column] for row in self._tables[table].scan_in(column, [str(name) for name in to_write])}
            filled = [row for name, row in to_write.items() if name not in present]
        self._tables[table].append(filled)

    def rows(
        self,
        table: str,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        outcomes: Sequence[str] = ("completed",),
    ) -> list[dict[str, Any]]:
        """Read rows by a condition, in the order in which they were written; quicker than `sql` for single look-ups.

        Edges come as they were written; `lineage` knows which of them count. Results come from runs that ended with one
        of ``outcomes``.

        Raises:
            StorageError: if there is no such table or column, or it cannot be read.
        """
        wanted = list(columns) if columns is not None else self._table(table).schema.names
        owned = "run_id" in self._table(table).schema.names and table not in ("runs", "edges")
        read = self._tables[table].scan(where, [*wanted, *(["run_id"] if owned and "run_id" not in wanted else [])])
        matching: list[dict[str, Any]] = read.to_pylist()
        if owned:
            ids = (row["run_id"] for row in matching)
            runs = self._tables["runs"].scan_in("run_id", ids, columns=["run_id", "outcome"])
            counted = {row["run_id"] for row in runs if row["outcome"] in outcomes}
            matching = [row for row in matching if row["run_id"] in counted]
        return [{name: row[name] for name in wanted} for row in matching]

    def find_completed(self, stage_key: str) -> CompletedRun | None:
        """Return the latest completed run with a key, or None.

        Raises:
            StorageError: if the catalog cannot be read.
        """
        runs = self._tables["runs"].scan(f"stage_key = {quote(stage_key)} AND outcome = 'completed'").to_pylist()
        if not runs:
            return None
        return self.completed_run(runs[-1])  # by commits, since clocks may jump

    def completed_run(self, run: Mapping[str, Any]) -> CompletedRun:
        """Return what a run read and made, given its row.

        Raises:
            StorageError: if the catalog cannot be read.
        """
        edges = self._tables["edges"].scan(f"run_id = {quote(run['run_id'])}").to_pylist()
        inputs, outputs = (
            {edge["name"]: edge["artifact_id"] for edge in edges if edge["role"] == role}
            for role in ("input", "output")
        )
        return CompletedRun(
            run_id=run["run_id"],
            mlflow_run_id=run["mlflow_run_id"],
            ended_at=run["ended_at"],
            inputs=inputs,
            outputs=outputs,
        )

    def artifact(self, artifact_id: str) -> Artifact:
        """Return a registered artifact.

        Raises:
            StorageError: if there is none with that id.
        """
        return self.artifacts([artifact_id])[0]

    def artifacts(self, artifact_ids: Sequence[str]) -> list[Artifact]:
        """Return registered artifacts, in the order of their ids here.

        Raises:
            StorageError: if there is none with one of the ids.
        """
        return [self._artifact(row) for row in self._artifact_rows(artifact_ids)]

    def _artifact(self, row: Mapping[str, Any]) -> Artifact:
        return Artifact.from_row({**row, "uri": self._home.from_uri(row["uri"])})

    def _artifact_rows(self, artifact_ids: Sequence[str]) -> list[dict[str, Any]]:
        by_id: dict[str, dict[str, Any]] = {}
        for row in self._tables["artifacts"].scan_in("artifact_id", artifact_ids):
            by_id.setdefault(row["artifact_id"], row)  # of two processes that registered one, the first counts
        for name in artifact_ids:
            if name not in by_id:
                raise StorageError(f"no artifact {name} in the catalog: see `SELECT artifact_id FROM artifacts`")
        return [by_id[name] for name in artifact_ids]

    def created_at_ms(self, artifact_id: str) -> int:
        """Return when an artifact was first registered, in milliseconds since 1970, UTC.

        Raises:
            StorageError: if there is none with that id.
        """
        created: dt.datetime = self._artifact_rows([artifact_id])[0]["created_at"]  # naive, in UTC
        return round(created.replace(tzinfo=dt.UTC).timestamp() * 1000)

    def lineage(self, any_id: str, direction: str = "up", *, most_steps: int | None = None) -> LineageGraph:
        """Return everything that something came from ("up"), went into ("down"), or both ("around").

        Args:
            any_id: id of an artifact or run, of an MLflow run of a curve or stage, or the first 6 or more characters
                of one, if no other id begins so.
            direction: "up", "down" or "around".
            most_steps: how far to go, from an artifact to a run or from a run to an artifact; to the end by default.

        Raises:
            StorageError: if the id is unknown or ambiguous, or the direction is another.
        """
        return walk(self._tables, any_id, direction, most_steps)

    def sql(self, query: str, *, at: int | dt.datetime | None = None) -> pa.Table:
        """Answer one SQL query over the catalog's tables; it can neither write nor reach files or the network.

        Args:
            query: one SELECT over the tables of `storage.tables.schemas` and the views of `storage.tables.views`.
            at: as the catalog was at this version (see `version`) or time; a naive time is in UTC.

        Returns:
            An Arrow table; `.to_pandas()` makes a data frame of it.

        Raises:
            StorageError: if the query is wrong or not allowed, or there is no such version.
        """
        from storage.catalog.sql import query_tables

        version = self._tables["runs"].version_at(at) if isinstance(at, dt.datetime) else at
        if version is not None and not 0 <= version <= self.version():
            raise StorageError(f"no version {version} of the catalog: it has 0 to {self.version()}")
        return query_tables(self._tables, query, version=version)

    def compact(self) -> dict[str, tuple[int, int]]:
        """Merge the small files of every table and index all rows: table -> files that there were and are.

        Recording runs does this by itself, little by little; every version stays readable.

        Raises:
            StorageError: if a table cannot be written.
        """
        return {name: table.compact() for name, table in self._tables.items()}

    def version(self) -> int:
        """Return the latest version: it grows with every run that is recorded; 0 for an empty catalog."""
        return self._tables["runs"].version()

    def _table(self, name: str) -> Table:
        if name not in self._tables:
            raise StorageError(f"no table {name!r} in the catalog: expected one of {', '.join(self._tables)}")
        return self._tables[name]

    def _require_artifacts(self, inputs: Mapping[str, str]) -> list[Artifact]:
        rows = {row["artifact_id"]: row for row in self._tables["artifacts"].scan_in("artifact_id", inputs.values())}
        for name, artifact_id in inputs.items():
            if artifact_id not in rows:
                raise StorageError(f"input {name!r} is {artifact_id!r}: no such artifact; register it before the run")
            if name in ("code", "environment"):
                raise StorageError(f"input {name!r}: the catalog adds code and environment itself; leave it out")
        return [self._artifact(row) for row in rows.values()]
