"""MLflow: one run for each budget curve, training curves, and the registry of policies.

Runs are named by explicit ids only, since MLflow's stack of active runs belongs to a thread. What is logged twice is
there once: a run carries the digest of what it was made from, and points have the caller's timestamps, which are part
of a point's key.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpolicy.digests import digest_folder, digest_json
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.client import one_line_errors, open_client
from storage.mlflow.deletions import require_experiment

RUN_KEY_TAG = "kvp.run_key"
POLICY_DIGEST_TAG = "kvp.policy_digest"
POLICY_SET_TAG = "kvp.policy_set_id"
CHALLENGER = "challenger"
_BATCH = 1000  # MLflow's limit of metrics a request
_PARAM_BATCH = 100  # and of parameters and tags
_DIGEST_LENGTH = 36  # and the length of a dataset's digest
_POLICY_PATH = "policy"

Point = tuple[str, int, float]
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class DatasetRef:
    """A data set that a run read.

    Attributes:
        name: its name.
        digest: its digest, in full.
        uri: where it lies.
        context: what it was used for, such as "evaluation".
    """

    name: str
    digest: str
    uri: str = ""
    context: str = ""


@dataclass(frozen=True, kw_only=True)
class CurveRun:
    """A budget curve, to be a run of its own.

    Attributes:
        experiment: name of the experiment.
        parent_run_id: run under which it is nested; "" for none.
        name: name of the run.
        tags: tags.
        params: parameters.
        points: (metric, budget in tokens, value), each metric and budget once.
        timestamp_ms: time of the run and of all points, the same when the curve is logged again.
        datasets: what it was measured on.
    """

    experiment: str
    parent_run_id: str
    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    points: Sequence[Point]
    timestamp_ms: int
    datasets: Sequence[DatasetRef] = field(default_factory=tuple)


class Tracking:
    """MLflow's tracking and registry in a home's SQLite database. Any number of processes may use it at once."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def prepare(self) -> None:
        """Set the database up, once for all processes; do so before a fan-out.

        Raises:
            StorageError: if it cannot be set up.
        """
        with one_line_errors("cannot set MLflow's database up"):
            self._client.search_experiments(max_results=1)

    @property
    def _client(self) -> Any:
        return open_client(self._home)

    def start_parent(
        self,
        *,
        experiment: str,
        name: str,
        tags: Mapping[str, str],
        timestamp_ms: int,
        params: Mapping[str, str] | None = None,
        datasets: Sequence[DatasetRef] = (),
    ) -> str:
        """Start a run that others are nested under, and return its id; the same call again returns the same run.

        Raises:
            StorageError: if MLflow refuses it.
        """
        curve = CurveRun(
            experiment=experiment,
            parent_run_id="",
            name=name,
            tags=tags,
            params=params or {},
            points=(),
            timestamp_ms=timestamp_ms,
            datasets=datasets,
        )
        with one_line_errors(f"cannot start the MLflow run {name!r}"):
            run_id, _ = self._open_run(curve)
        return run_id

    def finish(self, run_id: str, *, timestamp_ms: int) -> None:
        """End a run that succeeded; one that did not is found and finished by the next attempt.

        Raises:
            StorageError: if there is no such run.
        """
        with one_line_errors(f"cannot end the MLflow run {run_id}"):
            self._client.set_terminated(run_id, "FINISHED", end_time=timestamp_ms)

    def log_curve(self, curve: CurveRun) -> str:
        """Log a curve as a finished run and return the run's id; the same curve again returns the same run.

        Raises:
            StorageError: if a value is not finite, a metric has two values at one budget, or MLflow refuses it.
        """
        _check_points(curve.points)
        with one_line_errors(f"cannot log the MLflow run {curve.name!r}"):
            run_id, finished = self._open_run(curve)
            if not finished:
                self._log_points(run_id, curve.points, curve.timestamp_ms)
                self._client.set_terminated(run_id, "FINISHED", end_time=curve.timestamp_ms)
        return run_id

    def log_training(self, run_id: str, points: Sequence[Point], *, timestamp_ms: int) -> None:
        """Log training curves, as (metric, training step, value), into a run.

        Raises:
            StorageError: as `log_curve`.
        """
        _check_points(points)
        with one_line_errors(f"cannot log metrics into the MLflow run {run_id}"):
            self._log_points(run_id, points, timestamp_ms)

    def log_artifact(self, run_id: str, path: str | Path, artifact_path: str = "") -> None:
        """Copy a file, or the contents of a folder, to a run's artifacts.

        Raises:
            StorageError: if there is no such path or run.
        """
        source = Path(path)
        if not source.exists():
            raise StorageError(f"no file or folder at {path}: cannot log it as an artifact")
        log = self._client.log_artifacts if source.is_dir() else self._client.log_artifact
        with one_line_errors(f"cannot log {path} into the MLflow run {run_id}"):
            log(run_id, str(source), artifact_path or None)

    def register_policy(
        self, *, name: str, folder: str | Path, run_id: str, tags: Mapping[str, str], description: str
    ) -> str:
        """Register a policy set as a version of a model and return the version.

        The same folder and run again give the same version, whatever its aliases are by then. The folder is copied to
        the run's artifacts, and the version refers to that copy. It has no alias until something is decided on it
        (`move_alias`).

        Args:
            name: name of the registered model; what MLflow does not allow in one becomes a dash.
            folder: the policy set.
            run_id: MLflow run that it comes from.
            tags: tags of the version.
            description: description of the version, in Markdown.

        Raises:
            InputError: if there is no such folder.
            StorageError: if there is no such run, or MLflow refuses it.
        """
        digest = digest_folder(Path(folder))
        name = _NOT_IN_A_NAME.sub("-", name)
        with one_line_errors(f"cannot register the policy {name!r}"):
            client, version = self._client, self._find_version(run_id, digest)
            place = f"{_POLICY_PATH}-{digest[:16]}"  # of its own: another set of this run must not replace it
            if version is None or not client.list_artifacts(run_id, place):
                client.log_artifacts(run_id, str(folder), place)
            if version is None:
                _ignore_existing(lambda: client.create_registered_model(name))
                version = client.create_model_version(
                    name,
                    source=f"{client.get_run(run_id).info.artifact_uri}/{place}",
                    run_id=run_id,
                    tags={**tags, POLICY_DIGEST_TAG: digest},
                    description=description,
                ).version
        return str(version)

    def has_policy(self, policy_set_id: str) -> bool:
        """Return whether a policy set is a version of a model, with its files; people delete either.

        Raises:
            StorageError: if MLflow refuses.
        """
        with one_line_errors(f"cannot look {policy_set_id} up in the registry"):
            versions = self._tagged_versions(policy_set_id)
            if not versions:
                return False
            newest = _newest(versions)
            return bool(self._client.list_artifacts(newest.run_id, newest.source.rpartition("/")[2]))

    def describe_policy(self, policy_set_id: str, description: str) -> None:
        """Say on a policy set's page in the registry what became known of it after it was registered.

        Args:
            policy_set_id: the policy set, as the tag `POLICY_SET_TAG` of its version has it.
            description: in Markdown, in place of what was there.

        Raises:
            StorageError: if no version is tagged so, or MLflow refuses it.
        """
        with one_line_errors(f"cannot describe {policy_set_id} in the registry"):
            version = self._tagged_version(policy_set_id)
            self._client.update_model_version(version.name, version.version, description)

    def move_alias(self, alias: str, policy_set_id: str) -> bool:
        """Let an alias point at a policy set, and at no other of its model; returns whether it did not do so before.

        Args:
            alias: `CHAMPION` or `CHALLENGER`.
            policy_set_id: the policy set, as the tag `POLICY_SET_TAG` of its version has it.

        Raises:
            StorageError: if no version is tagged so, or MLflow refuses it.
        """
        with one_line_errors(f"cannot move the alias {alias!r} to {policy_set_id}"):
            version = self._tagged_version(policy_set_id)
            present = self._client.get_registered_model(version.name).aliases.get(alias)
            if present is not None and int(present) == int(version.version):
                return False
            self._client.set_registered_model_alias(version.name, alias, version.version)
            return True

    def policy_with_alias(self, alias: str, *, beside: str) -> str:
        """Return the policy set that an alias points at, of the model of another policy set; "" if it points nowhere.

        Args:
            alias: `CHAMPION` or `CHALLENGER`.
            beside: the other policy set, as the tag `POLICY_SET_TAG` of its version has it.

        Raises:
            StorageError: if no version is tagged so, or MLflow refuses it.
        """
        with one_line_errors(f"cannot look the alias {alias!r} up beside {beside}"):
            name = self._tagged_version(beside).name
            number = self._client.get_registered_model(name).aliases.get(alias)
            if number is None:
                return ""
            return str(self._client.get_model_version(name, str(number)).tags.get(POLICY_SET_TAG, ""))

    def _tagged_version(self, policy_set_id: str) -> Any:
        """The newest version of a policy set: one that came of several trainings has several."""
        versions = self._tagged_versions(policy_set_id)
        if not versions:
            raise StorageError(f"{policy_set_id} is no version in MLflow's registry: `kvp promote` registers it again")
        return _newest(versions)

    def _tagged_versions(self, policy_set_id: str) -> list[Any]:
        return list(self._client.search_model_versions(f"tags.`{POLICY_SET_TAG}` = '{policy_set_id}'"))

    def _find_version(self, run_id: str, digest: str) -> str | None:
        """The version of a policy set of a run, whatever its model is called by now."""
        for version in self._client.search_model_versions(f"run_id = '{run_id}'"):
            if version.tags.get(POLICY_DIGEST_TAG) == digest:
                return str(version.version)
        return None

    def _open_run(self, curve: CurveRun) -> tuple[str, bool]:
        """Find or make the run of a curve, with everything but its points; return its id and whether it is finished."""
        experiment_id = self._experiment(curve.experiment)  # first: it quiets MLflow, and that goes before any import

        from mlflow.entities import Param

        key = digest_json(_plain(asdict(curve)))
        runs = self._client.search_runs([experiment_id], f"tags.`{RUN_KEY_TAG}` = '{key}'", max_results=1)
        if runs and runs[0].info.status == "FINISHED":
            return str(runs[0].info.run_id), True
        if runs:
            run_id = str(runs[0].info.run_id)
        else:
            tags = {**curve.tags, RUN_KEY_TAG: key}
            tags |= {f"kvp.digest.{dataset.name}": dataset.digest for dataset in curve.datasets}
            if curve.parent_run_id:
                tags["mlflow.parentRunId"] = curve.parent_run_id
            run = self._client.create_run(experiment_id, start_time=curve.timestamp_ms, tags=tags, run_name=curve.name)
            run_id = str(run.info.run_id)
        params = [Param(name, str(value)) for name, value in curve.params.items()]
        for batch in _batches(params, _PARAM_BATCH):
            self._client.log_batch(run_id, params=batch, synchronous=True)
        if curve.datasets:
            self._client.log_inputs(run_id, datasets=[_dataset_input(dataset) for dataset in curve.datasets])
        return run_id, False

    def _log_points(self, run_id: str, points: Sequence[Point], timestamp_ms: int) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, float(value), timestamp_ms, int(step)) for name, step, value in points]
        for batch in _batches(metrics, _BATCH):
            self._client.log_batch(run_id, metrics=batch, synchronous=True)

    def _experiment(self, name: str) -> str:
        require_experiment(self._home, name)
        known = self._client.get_experiment_by_name(name)
        if known is None:
            place = self._home.mlflow_artifacts / _NOT_IN_A_NAME.sub("-", name)
            _ignore_existing(lambda: self._client.create_experiment(name, artifact_location=place.as_uri()))
            known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id)


def _check_points(points: Sequence[Point]) -> None:
    values: dict[tuple[str, int], float] = {}
    for name, step, value in points:
        if not math.isfinite(value):
            raise StorageError(f"metric {name!r} at step {step} is {value}: expected a finite number; leave it out")
        if values.setdefault((name, step), value) != value:
            raise StorageError(f"metric {name!r} has two values at step {step}: {values[name, step]} and {value}")


def _dataset_input(dataset: DatasetRef) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return DatasetInput(
        dataset=Dataset(
            name=dataset.name,
            digest=dataset.digest[:_DIGEST_LENGTH],
            source_type="local",
            source=json.dumps({"uri": dataset.uri}),
        ),
        tags=[InputTag("mlflow.data.context", dataset.context)] if dataset.context else [],
    )


def _newest(versions: Sequence[Any]) -> Any:
    return max(versions, key=lambda version: int(version.version))


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Make what callers pass as numbers or paths text, as MLflow will."""
    return {**value, **{part: {name: str(item) for name, item in value[part].items()} for part in ("tags", "params")}}


def _batches(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))


def _ignore_existing(create: Any) -> None:
    from mlflow.exceptions import MlflowException

    try:
        create()
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
