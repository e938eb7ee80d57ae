"""A recorded run as it can be asked for again: its request, and what it read, checked to be there and what it was."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.request import Request
from kvpolicy.errors import InputError
from storage.catalog.catalog import Catalog, CompletedRun
from storage.catalog.run_differences import find_run
from storage.home import Home
from storage.lineage.artifacts import Artifact
from tasks.framework.references import ModelRef
from tasks.framework.stage import lost_results
from tasks.framework.work import Record
from tasks.model import recorded_model

_WHY_NOT = {"failed": "failed", "repeated": "is a repetition itself"}


@dataclass(frozen=True, kw_only=True)
class Original:
    """A run that can be repeated.

    Attributes:
        row: Its row in the table `runs`.
        known: What it read and made.
        request: What it ran for.
        request_id: Artifact of that.
    """

    row: Mapping[str, Any]
    known: CompletedRun
    request: Request
    request_id: str

    @property
    def parameters(self) -> dict[str, Any]:
        """Its parameters."""
        return dict(json.loads(self.row["parameters_json"]))


def find_original(home: Home, any_id: str) -> Original:
    """Find the run that is meant, if it can be repeated.

    Args:
        home: The home.
        any_id: A run, or an artifact or MLflow run that one made; 6 or more first characters do.

    Raises:
        InputError: If the run did not make anything itself, or its request was not recorded.
        StorageError: If the id is unknown or ambiguous, or no run made that artifact.
    """
    catalog = Catalog(home)
    row = find_run(catalog, any_id)
    if any_id.startswith("run-") and not row["run_id"].startswith(any_id):  # it was taken for the one it stands on
        raise InputError(f"{any_id} was skipped: repeat {row['run_id']}, which it stands on")
    if row["outcome"] != "completed":
        raise InputError(
            f"{row['run_id']} {_WHY_NOT[row['outcome']]} ({row['reason']}): only a completed run can be repeated"
        )
    if row["stage"] == "promote":
        raise InputError(
            f"{row['run_id']} decided who is champion, which is not repeated: `kvp promote` does it by hand"
        )
    known = catalog.completed_run(row)
    request_id = known.inputs.get("request")
    if request_id is None:
        raise InputError(
            f"{row['run_id']} has no recorded request, which runs of earlier releases lack: "
            "run the pipeline again with its options, then that run can be repeated"
        )
    request = Request.from_artifact(catalog.artifact(request_id))
    return Original(row=row, known=known, request=request, request_id=request_id)


class Recorded(Record):
    """What a recorded run read, as references for tasks.

    Each is there and what it was, or else an `InputError` names the one that is not.

    Attributes:
        home: Where tasks are to work.
        original: The run.
        config: Its configuration.
        parameters: Its parameters.
        known: What it read and made.
        seed: That was asked for.
        own_seed: Its own; policy sets of one request have seeds of their own.
    """

    def __init__(self, home: Home, original: Original) -> None:
        self.home, self.original = home, original
        self.config, self.parameters, self.known = original.request.config, original.parameters, original.known
        self.seed, self.own_seed = original.request.seed, original.row["seed"]

    def model(self) -> ModelRef:
        """The model."""
        return recorded_model(
            self.home, self.known.inputs["model"], dtype=self.config.dtype, source=self.original.request.model
        )

    def artifact(self, role: str, *, rests_on: str = "") -> Artifact:
        """What the run read in a role, see `Record`."""
        catalog, artifact_id = Catalog(self.home), self.known.inputs[role]
        maker = catalog.completed_run(find_run(catalog, artifact_id))
        only = dataclasses.replace(maker, outputs={role: artifact_id})
        lost = lost_results(self.home, only, rests_on=rests_on)
        if lost:
            raise InputError(
                f"{role} of {self.known.run_id}, {lost[0].artifact_id}, is lost or damaged at {lost[0].uri}: "
                "`kvp run` with the options of that run makes it again"
            )
        return catalog.artifact(artifact_id)
