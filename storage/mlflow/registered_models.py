"""Models that others put into MLflow's registry: which versions there are, and the files of one.

Nothing is written there; policy sets are registered in `storage.mlflow.tracking`. Which of the files make a model is
not known here. MLflow's own `models:/` addresses are not resolved by MLflow, which would ask the registry of the
process.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvpolicy.digests import digest_json
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.client import one_line_errors, open_client

_ML_MODEL = "MLmodel"
_REMEDY = "check the name, and that MLflow's database and artifacts can be read"


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """A version of a registered model; it never changes.

    Attributes:
        name: of the registered model.
        number: the version.
        identity: digest that tells it from every other version, also one of the same name and number elsewhere.
        place: URI of its files.
    """

    name: str
    number: str
    identity: str
    place: str

    @property
    def reference(self) -> str:
        """How MLflow and `--model` name it."""
        return f"models:/{self.name}/{self.number}"


class RegisteredModels:
    """The registry in MLflow's database of a home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def find(self, name: str, *, number: str = "", alias: str = "") -> ModelVersion:
        """Find a version of a model: of that number, the one that an alias points at, or else the newest.

        Args:
            name: of the registered model.
            number: of the version; "" for none.
            alias: of the version; "" for none.

        Raises:
            StorageError: if there is none, or MLflow cannot be asked.
        """
        asked = f"models:/{name}/{number}" if number else f"models:/{name}@{alias}" if alias else f"version of {name!r}"
        if not (self._home.mlflow_place or self._home.mlflow_db.exists()):  # asking would make it
            raise StorageError(f"no {asked} in MLflow's registry: {self._home.mlflow_db} is not there yet")
        with one_line_errors(f"no {asked} in MLflow's registry {self._home.mlflow_tracking_uri}", _REMEDY):
            client = open_client(self._home)
            if number:
                registered = client.get_model_version(name, number)
            elif alias:
                registered = client.get_model_version_by_alias(name, alias)
            else:
                versions = client.search_model_versions(f"name = '{name}'", order_by=["version_number DESC"])
                registered = next((version for version in versions if version.status == "READY"), None)
            if registered is None:
                raise LookupError("nothing of that name has one")
            return self._described(client, registered)

    def names(self, version: ModelVersion, folder: str = "") -> list[str]:
        """Return the files and folders in a folder of a version, as paths from its root.

        Raises:
            StorageError: if there are none, or they cannot be reached.
        """
        with one_line_errors(f"no files of {version.reference} at {version.place}", _REMEDY):
            paths = [str(item.path) for item in self._files(version).list_artifacts(folder or None)]
            if not paths:  # MLflow says the same of a folder that is lost
                raise LookupError(f"{folder or 'the folder'} is empty or lost")
            return paths

    def flavors(self, version: ModelVersion) -> Mapping[str, Mapping[str, Any]]:
        """Return what MLflow's record of a logged model says of each of its flavours.

        Raises:
            StorageError: if the record is not there or cannot be read.
        """
        with (
            one_line_errors(f"cannot read {_ML_MODEL} of {version.reference} at {version.place}", _REMEDY),
            tempfile.TemporaryDirectory() as scratch,
        ):
            from mlflow.models import Model

            return dict(Model.load(self._files(version).download_artifacts(_ML_MODEL, scratch)).flavors)

    def fetch(self, version: ModelVersion, path: str, to: Path) -> None:
        """Copy a file of a version to a path, where it appears only when it is whole.

        Args:
            version: the version.
            path: of the file, from the version's root.
            to: where it is to be, in a folder that is there.

        Raises:
            StorageError: if it cannot be fetched or written.
        """
        scratch = Path(tempfile.mkdtemp(dir=to.parent, prefix=".fetched-"))
        try:
            with one_line_errors(f"cannot fetch {path} of {version.reference} at {version.place}", _REMEDY):
                Path(self._files(version).download_artifacts(path, str(scratch))).replace(to)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _files(self, version: ModelVersion) -> Any:
        open_client(self._home)  # it quiets MLflow, and that goes before any import
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        uri = self._home.mlflow_tracking_uri
        return get_artifact_repository(version.place, tracking_uri=uri, registry_uri=uri)

    def _described(self, client: Any, registered: Any) -> ModelVersion:
        facts = [
            registered.name,
            str(registered.version),
            registered.source,
            registered.run_id,
            registered.model_id,
            registered.creation_timestamp,
        ]
        return ModelVersion(
            name=str(registered.name),
            number=str(registered.version),
            identity=digest_json(facts)[:32],
            place=self._present_place(str(client.get_model_version_download_uri(registered.name, registered.version))),
        )

    def _present_place(self, uri: str) -> str:
        """Where files are: MLflow notes full paths, which no longer hold in a home that was moved or copied."""
        artifacts = self._home.mlflow_artifacts
        inside = "/".join(artifacts.parts[-2:])
        _, separator, rest = uri.rpartition(f"/{inside}/")
        noted = Path(url2pathname(urlsplit(uri).path))
        moved = artifacts / url2pathname(rest)
        return moved.as_uri() if separator and not noted.exists() and moved.exists() else uri
