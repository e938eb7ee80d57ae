"""The record of one run while it lasts: what it makes is held back until it has succeeded."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from kvpolicy.digests import canonical_json
from kvpolicy.errors import first_line
from storage.environment import Environment
from storage.errors import StorageError
from storage.lineage.artifacts import Artifact, code_artifact, environment_artifact
from storage.tables.lance_table import to_arrow
from storage.tables.schemas import TABLES

# Rows of these tables belong to the record itself.
RECORD_TABLES = frozenset({"artifacts", "runs", "edges"})


def new_run_id() -> str:
    """Return a fresh run id."""
    return f"run-{uuid.uuid4().hex[:16]}"


def utc_now() -> dt.datetime:
    """Return the time as the tables hold it: naive, in UTC."""
    return dt.datetime.now(dt.UTC).replace(tzinfo=None)


class RunRecorder:
    """A run that is going on; `storage.catalog.catalog.Catalog.record_run` makes one and writes it.

    Attributes:
        run_id: id of the run, known from its start.
        mlflow_run_id: MLflow run of the stage; set it when there is one.
    """

    def __init__(
        self,
        *,
        stage: str,
        stage_key: str,
        parameters: Mapping[str, Any],
        inputs: Mapping[str, str],
        code_fingerprint: str,
        seed: int | None,
        prefect_flow_run_id: str,
        prefect_task_run_id: str,
        environment: Environment,
        modules: Mapping[str, str],
        repeats: str,
        shared_by: int = 1,
    ) -> None:
        self.run_id = new_run_id()
        self.mlflow_run_id = ""
        self._repeats, self._shared_by = repeats, shared_by
        self._code = code_artifact(code_fingerprint, environment, modules)
        self._environment = environment_artifact(environment)
        self._inputs = {
            **inputs,
            "code": self._code.artifact_id,
            "environment": self._environment.artifact_id,
        }
        self._outputs: dict[str, Artifact] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._started_at, self._clock = utc_now(), time.monotonic()
        self._row = {
            "run_id": self.run_id,
            "stage": stage,
            "stage_key": stage_key,
            "parameters_json": canonical_json(parameters),
            "seed": seed,
            "git_commit": environment.git_commit,
            "git_dirty": environment.git_dirty,
            "environment_id": self._environment.artifact_id,
            "code_fingerprint": code_fingerprint,
            "hardware": environment.hardware,
            "started_at": self._started_at,
            "prefect_flow_run_id": prefect_flow_run_id,
            "prefect_task_run_id": prefect_task_run_id,
            "reused_run_id": "",
        }

    def output(self, name: str, artifact: Artifact) -> str:
        """Note that the run made an artifact, and return its id. It is registered when the run succeeds.

        Raises:
            StorageError: if another artifact has that name already.
        """
        present = self._outputs.get(name)
        if present is not None and present.artifact_id != artifact.artifact_id:
            raise StorageError(f"run {self.run_id} has an output {name!r} already: {present.artifact_id}")
        self._outputs[name] = artifact
        return artifact.artifact_id

    def append(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows to a table of results when the run succeeds. ``run_id`` and ``created_at`` are filled in.

        Raises:
            StorageError: if there is no such table or a row does not fit it.
        """
        if table not in TABLES or table in RECORD_TABLES:
            raise StorageError(
                f"no table of results {table!r}: expected {', '.join(sorted(set(TABLES) - RECORD_TABLES))}"
            )
        filled = fill_in(table, rows, run_id=self.run_id)
        to_arrow(table, filled, TABLES[table])  # fail here, at the caller's line, not when all is done
        self._rows.setdefault(table, []).extend(filled)

    @property
    def surroundings(self) -> list[Artifact]:
        """The code and environment that the run used."""
        return [self._code, self._environment]

    @property
    def outputs(self) -> Mapping[str, Artifact]:
        """The artifacts that the run made, by name."""
        return self._outputs

    @property
    def result_rows(self) -> Mapping[str, list[dict[str, Any]]]:
        """Rows for the tables of results."""
        return self._rows

    def edges(self, *, with_outputs: bool) -> list[dict[str, Any]]:
        """Return the rows of the table `edges`."""
        pairs = [("input", name, artifact_id) for name, artifact_id in self._inputs.items()]
        if with_outputs:
            pairs += [("output", name, artifact.artifact_id) for name, artifact in self._outputs.items()]
        return [
            {"run_id": self.run_id, "artifact_id": artifact_id, "role": role, "name": name}
            for role, name, artifact_id in pairs
        ]

    def row(self, failure: BaseException | None = None) -> dict[str, Any]:
        """Return the row of the table `runs`, ended now."""
        seconds = time.monotonic() - self._clock
        outcome, reason = ("repeated", f"repeats {self._repeats}") if self._repeats else ("completed", "")
        if failure is not None:
            outcome, reason = "failed", f"{type(failure).__name__}: {first_line(failure)}"
        return {
            **self._row,
            "outcome": outcome,
            "reason": reason,
            "ended_at": self._started_at + dt.timedelta(seconds=seconds),
            "seconds": seconds / self._shared_by,
            "mlflow_run_id": "" if self._repeats else self.mlflow_run_id,  # a repetition's is not kept
        }


def fill_in(table: str, rows: Iterable[Mapping[str, Any]], *, run_id: str | None = None) -> list[dict[str, Any]]:
    """Fill in ``created_at`` and, if given, ``run_id`` where a table has them."""
    names = TABLES[table].names
    defaults: dict[str, Any] = {"created_at": utc_now()} if "created_at" in names else {}
    if run_id is not None and "run_id" in names:
        defaults["run_id"] = run_id
    return [{**defaults, **row} for row in rows]
