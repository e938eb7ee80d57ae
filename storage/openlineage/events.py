"""OpenLineage's events of a run: one START, and one COMPLETE or FAIL.

They are built from what the catalog has of the run, so they can be made again at any time. Only three things are those
of now: the namespace of jobs, the address of the checkout, and columns of Parquet files, which are read there. The
vocabulary (names, ids, facets) is described in docs/lineage.md; `storage.openlineage.delivery` sends and keeps events.
A skipped run has none: no job ran, and a second COMPLETE would tell a receiver that its datasets were written again.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import uuid
from typing import Any

import attr
from openlineage.client import event_v2
from openlineage.client.facet_v2 import (
    JobFacet,
    RunFacet,
    error_message_run,
    job_type_job,
    parent_run,
    processing_engine_run,
    source_code_location_job,
)

from storage.environment import checkout_url
from storage.lineage.run_record import RecordedRun
from storage.openlineage.dataset_facets import input_dataset, is_data, output_dataset

FACETS_VERSION = "1-0-0"
DEFAULT_JOB_NAMESPACE = "kvpolicy"
PARENT_JOB = "flow"
_PRODUCER = f"urn:kvpolicy:openlineage:{FACETS_VERSION}"
_RUN_IDS = uuid.uuid5(uuid.NAMESPACE_URL, "urn:kvpolicy:runs")
_PACKAGE = "kvpolicy"


@attr.define
class StageRunFacet(RunFacet):
    """Facts of a run beyond the standard facets; its schema is storage/openlineage/facets/StageRunFacet.json."""

    catalogRunId: str  # the style of names is OpenLineage's
    stageKey: str
    parameters: dict[str, Any]
    codeFingerprint: str
    gitDirty: bool
    environment: str
    hardware: str
    inputs: dict[str, str]
    seed: int | None = None
    outcome: str | None = None
    seconds: float | None = None
    mlflowRunId: str | None = None

    @staticmethod
    def _get_schema() -> str:
        return f"urn:kvpolicy:openlineage:{FACETS_VERSION}:StageRunFacet#/$defs/StageRunFacet"


def run_uuid(run_id: str) -> str:
    """Return OpenLineage's id of a run of the catalog; always the same one."""
    return str(uuid.uuid5(_RUN_IDS, run_id))


def run_events(recorded: RecordedRun) -> list[event_v2.RunEvent]:
    """Return all events of a run that has ended; none of a skipped one."""
    if recorded.row["outcome"] == "skipped":
        return []
    return [start_event(recorded), end_event(recorded)]


def start_event(recorded: RecordedRun) -> event_v2.RunEvent:
    """Return the event of a run's start; how the run ended changes nothing in it."""
    return _event(recorded, event_v2.RunState.START, recorded.row["started_at"], _run_facets(recorded, has_ended=False))


def end_event(recorded: RecordedRun) -> event_v2.RunEvent:
    """Return the event of a run's end."""
    row, facets = recorded.row, _run_facets(recorded, has_ended=True)
    if row["outcome"] == "failed":
        facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
            message=row["reason"], programmingLanguage="PYTHON", producer=_PRODUCER
        )
        return _event(recorded, event_v2.RunState.FAIL, row["ended_at"], facets)
    outputs = [
        output_dataset(artifact, _PRODUCER, recorded.num_points.get(artifact.artifact_id))
        for artifact in recorded.outputs.values()
    ]
    return _event(recorded, event_v2.RunState.COMPLETE, row["ended_at"], facets, outputs)


def _event(
    recorded: RecordedRun,
    state: event_v2.RunState,
    time: dt.datetime,
    facets: dict[str, RunFacet],
    outputs: list[event_v2.OutputDataset] | None = None,
) -> event_v2.RunEvent:
    read = {artifact.artifact_id: artifact for artifact in recorded.inputs.values() if is_data(artifact)}
    return event_v2.RunEvent(
        eventType=state,
        eventTime=f"{time.isoformat(timespec='microseconds')}Z",
        run=event_v2.Run(run_uuid(recorded.run_id), facets=facets),
        job=event_v2.Job(_job_namespace(), recorded.row["stage"], facets=_job_facets(recorded)),
        inputs=[input_dataset(artifact, _PRODUCER) for artifact in read.values()],
        outputs=outputs or [],
        producer=_PRODUCER,
    )


def _run_facets(recorded: RecordedRun, *, has_ended: bool) -> dict[str, RunFacet]:
    row = recorded.row
    facets: dict[str, RunFacet] = {
        "kvpolicy_stage": StageRunFacet(
            catalogRunId=recorded.run_id,
            stageKey=row["stage_key"],
            parameters=json.loads(row["parameters_json"]),
            seed=row["seed"],
            codeFingerprint=row["code_fingerprint"],
            gitDirty=row["git_dirty"],
            environment=row["environment_id"],
            hardware=row["hardware"],
            inputs={role: artifact.artifact_id for role, artifact in recorded.inputs.items()},
            outcome=row["outcome"] if has_ended else None,
            seconds=row["seconds"] if has_ended else None,
            mlflowRunId=(row["mlflow_run_id"] or None) if has_ended else None,
            producer=_PRODUCER,
        )
    }
    surroundings = recorded.inputs.get("environment")
    packages = {} if surroundings is None else surroundings.metadata.get("packages", {})
    if _PACKAGE in packages:
        facets["processing_engine"] = processing_engine_run.ProcessingEngineRunFacet(
            name=_PACKAGE, version=packages[_PACKAGE], producer=_PRODUCER
        )
    if (parent := _as_uuid(row["prefect_flow_run_id"])) is not None:
        facets["parent"] = parent_run.ParentRunFacet(
            run=parent_run.Run(parent), job=parent_run.Job(_job_namespace(), PARENT_JOB), producer=_PRODUCER
        )
    return facets


def _job_facets(recorded: RecordedRun) -> dict[str, JobFacet]:
    facets: dict[str, JobFacet] = {
        "jobType": job_type_job.JobTypeJobFacet(
            processingType="BATCH", integration="KVPOLICY", jobType="STAGE", producer=_PRODUCER
        )
    }
    url, commit = checkout_url(), recorded.row["git_commit"]
    if url and commit:
        facets["sourceCodeLocation"] = source_code_location_job.SourceCodeLocationJobFacet(
            type="git", url=url, repoUrl=url, version=commit, producer=_PRODUCER
        )
    return facets


def _job_namespace() -> str:
    return os.environ.get("OPENLINEAGE_NAMESPACE") or DEFAULT_JOB_NAMESPACE


def _as_uuid(text: str) -> str | None:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return None
