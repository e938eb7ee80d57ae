"""The home: one folder that holds all state of the product, and the paths in it.

Not for the content of those paths; each belongs to the store that writes it. Standard library only, unless the traces
lie elsewhere, so that the command line can find its home before anything heavy is imported.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage.database import database_of_mlflow, require_postgresql, sqlite_uri
from storage.errors import StorageError

FORMAT_VERSION = 4
_LAST_RELEASES = {1: "0.1", 2: "0.1", 3: "0.1"}  # of earlier formats: those that read homes of them
_MARKER = "home.json"


@dataclass(frozen=True, kw_only=True)
class Home:
    """An opened home; make one with `Home.open`.

    Attributes:
        path: absolute path of the folder.
        traces_place: folder or URL of the trace store; None for a folder in the home.
        mlflow_place: URI of MLflow's database; None for a file in the home.
    """

    path: Path
    traces_place: str | None = None
    mlflow_place: str | None = None

    @classmethod
    def open(
        cls, path: str | Path, *, create: bool = True, traces: str | None = None, mlflow: str | None = None
    ) -> Home:
        """Open a home, and make it if it is new. Any number of processes may do so at once.

        Args:
            path: the folder.
            create: make a missing home, and require that an existing one can be written.
            traces: folder or s3:// URL of the trace store, for the life of the home; by default a folder in it.
            mlflow: postgresql:// URI of MLflow's database, for the life of the home; by default SQLite in it.

        Raises:
            StorageError: if something else is in the way, the folder cannot be written, no home is there and
                ``create`` is false, another version of the format made it, or its traces or MLflow lie elsewhere.
        """
        folder = Path(path).expanduser().absolute()
        marker = folder / _MARKER
        try:
            str(folder).encode()
        except UnicodeEncodeError as error:  # neither URIs nor tables can hold it
            raise StorageError(f"home {str(folder)!a} is not text in UTF-8: choose another --home") from error
        if traces is not None:
            from storage.traces.places import Place

            traces = Place.at(traces).url
        if mlflow is not None:
            mlflow = database_of_mlflow(mlflow)
        try:
            in_the_way, is_new = folder.exists() and not folder.is_dir(), not marker.exists()
        except OSError as error:
            raise StorageError(
                f"home {folder} cannot be read ({error.strerror}): change its permissions or choose another --home"
            ) from error
        if in_the_way:
            raise StorageError(f"home {folder} is not a folder: move that file or choose another --home")
        if is_new:
            if not create:
                raise StorageError(f"no home at {folder}: run the pipeline first or name another --home")
            if traces is not None:
                _make_store(traces)  # a place that cannot be used must not be a home's for good
            if mlflow is not None:
                require_postgresql(mlflow)
            _create(folder, marker, {"traces": traces, "mlflow": mlflow})
        content = _read(folder, marker)
        opened = cls(path=folder, traces_place=content.get("traces"), mlflow_place=content.get("mlflow"))
        if traces not in (None, opened.traces):
            raise StorageError(
                f"home {folder} keeps its traces at {opened.traces}, not at {traces}: choose another --home"
            )
        if mlflow not in (None, opened.mlflow_tracking_uri):
            raise StorageError(
                f"home {folder} keeps MLflow's runs in {opened.mlflow_tracking_uri}, not in the database of "
                "KVP_MLFLOW_URI: choose another --home, or unset it"
            )
        if create and not os.access(folder, os.W_OK | os.X_OK):
            raise StorageError(f"home {folder} is not writable: change its permissions or choose another --home")
        return opened

    @property
    def traces(self) -> str:
        """Folder or URL of the trace store."""
        return self.traces_place or str(self.path / "traces")

    def to_uri(self, uri: str) -> str:
        """What the catalog notes of a place: in the home the path from there, so that a home can be moved."""
        path = Path(uri)
        return str(path.relative_to(self.path)) if uri and path.is_relative_to(self.path) else uri

    def from_uri(self, uri: str) -> str:
        """The place that the catalog has noted, as an absolute path or a URL; empty where there is none."""
        return str(self.path / uri) if uri and "://" not in uri else uri

    @property
    def prompts(self) -> Path:
        """Folder of the prompt sets."""
        return self.path / "prompts"

    @property
    def policies(self) -> Path:
        """Folder of the policy sets."""
        return self.path / "policies"

    @property
    def evaluations(self) -> Path:
        """Folder of what evaluations keep beside the catalog."""
        return self.path / "evaluations"

    @property
    def figures(self) -> Path:
        """Folder of the plots."""
        return self.path / "figures"

    @property
    def catalog(self) -> Path:
        """Folder of the catalog's tables."""
        return self.path / "catalog"

    @property
    def prefect(self) -> Path:
        """Prefect's own home."""
        return self.path / "prefect"

    @property
    def mlflow(self) -> Path:
        """Folder of MLflow's database and artifacts."""
        return self.path / "mlflow"

    @property
    def mlflow_db(self) -> Path:
        """MLflow's SQLite database."""
        return self.mlflow / "mlflow.db"

    @property
    def mlflow_artifacts(self) -> Path:
        """Root of the artifacts of MLflow's experiments."""
        return self.mlflow / "artifacts"

    @property
    def mlflow_tracking_uri(self) -> str:
        """The tracking and registry URI of MLflow."""
        return self.mlflow_place or sqlite_uri(self.mlflow_db)


@contextmanager
def exclusive(home: Home, name: str) -> Iterator[None]:
    """Hold a lock of the home, waiting for whoever holds it; it ends with the process that holds it.

    Args:
        home: the home.
        name: name of the lock, of letters, digits and dashes.

    Raises:
        StorageError: if the lock cannot be made.
    """
    path = home.path / "locks" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise StorageError(f"cannot make the lock {path}: {error.strerror or error}; check the home") from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def is_held(home: Home, name: str) -> bool:
    """Return whether some process holds a lock of the home.

    Args:
        home: the home.
        name: name of the lock, as `exclusive` has it.
    """
    try:
        with (home.path / "locks" / name).open("r") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _make_store(traces: str) -> None:
    from storage.traces.layout import make_manifest
    from storage.traces.places import Place

    make_manifest(Place.at(traces))


def _create(folder: Path, marker: Path, places: Mapping[str, str | None]) -> None:
    draft = folder / f".{_MARKER}-{uuid.uuid4().hex}"
    chosen = {name: place for name, place in places.items() if place is not None}
    content = {"format_version": FORMAT_VERSION, **chosen}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        try:
            marker.hardlink_to(draft)  # whole, and only if nobody else was first
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot make a home at {folder}: {reason}; choose another --home") from error


def _read(folder: Path, marker: Path) -> dict[str, str]:
    """Check the version of a home, and return what of it lies elsewhere, by name."""
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
        version = content["format_version"]
        places = {name: str(content[name]) for name in ("traces", "mlflow") if content.get(name) is not None}
    except OSError as error:
        raise StorageError(f"cannot read {marker} ({error.strerror}): restore it or use a new --home") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{marker} is damaged: expected a format_version; restore it or use a new --home") from error
    if version != FORMAT_VERSION:
        earlier = _LAST_RELEASES.get(version) if isinstance(version, int) else None
        release = f"kvpolicy {earlier}, which reads it" if earlier else "the release that made it"
        raise StorageError(
            f"home {folder} has format version {version!r}, expected {FORMAT_VERSION}: use {release}, or a new --home"
        )
    return places
