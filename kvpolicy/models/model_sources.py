"""Places where new models turn up: folders with models and GGUF files, repositories of the hub, MLflow's registry.

Looking reads no weights; nothing is fetched, converted or loaded. Not for what a model is: `kvpolicy.models.reference`;
nor for asking MLflow's registry: `tasks.watch`.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError, first_line
from kvpolicy.models.gguf_file import is_part, missing_content
from kvpolicy.models.model_folder import content_files
from kvpolicy.models.reference import is_hub_id, resolve_model
from kvpolicy.models.registered import RegisteredName

FOLDER, HUB, REGISTRY = "folder", "hub", "mlflow"
SOURCE_FORMS = "folder:PATH, hub:owner/name[@revision] or mlflow:NAME[@alias]"
_WEIGHTS = (".safetensors", ".bin")
_HUB_TIMEOUT_S = 10.0
_GIVEN_UP_AFTER_S = 24 * 3600.0  # nobody copies a file for so long without a byte


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model that a source has.

    Attributes:
        source: The source, as it was named.
        reference: The model as a pipeline is given it.
        state: Changes when its files do: a digest of their names, sizes and times; of a repository the commit, of a
            registered model the identity of the version.
    """

    source: str
    reference: str
    state: str

    @property
    def is_fixed(self) -> bool:
        """Whether its files cannot change: a commit or a registered version, which would have to be fetched."""
        return ModelSource.parse(self.source).kind != FOLDER

    def present_state(self) -> str:
        """`state` as it is now; empty if the files are gone."""
        if self.is_fixed:
            return self.state
        try:
            return _state(Path(self.reference))
        except OSError:
            return ""

    def missing(self) -> str:
        """What keeps a GGUF file from being whole; empty for one that is whole, and for everything else.

        Raises:
            InputError: If it will not become whole: its header is wrong, or it has not changed for a day.
            OSError: If the file cannot be read.
        """
        path = Path(self.reference)
        missing = missing_content(path) if path.suffix == ".gguf" else ""
        if missing and time.time() - path.stat().st_mtime > _GIVEN_UP_AFTER_S:
            raise InputError(f"GGUF file {path} has not changed for a day, and {missing}: copy it again")
        return missing

    def digest(self) -> str:
        """What tells its content from any other: of a GGUF file the SHA-256, of a folder the model's digest.

        Of what is fixed it is the state.

        Raises:
            InputError: If the files of a folder are damaged.
            OSError: If the files cannot be read.
        """
        if self.is_fixed:
            return self.state
        path = Path(self.reference)
        return digest_file(path) if path.suffix == ".gguf" else resolve_model(self.reference).digest

    def require_supported_form(self) -> None:
        """Refuse what needs no reading to be refused.

        Raises:
            InputError: If it is one of several GGUF files that make a model together.
        """
        if self.reference.endswith(".gguf") and is_part(Path(self.reference)):
            raise InputError(f"GGUF file {self.reference} is one part of several: merge them into one file")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A place to look for models.

    Attributes:
        kind: `folder`, `hub` or `mlflow`.
        place: The folder, as an absolute path; the repository as `owner/name` or `owner/name@revision`; the registered
            model as `NAME` or `NAME@ALIAS`.
    """

    kind: str
    place: str

    @classmethod
    def parse(cls, text: str) -> "ModelSource":
        """Read a source as people write it: `folder:PATH`, `hub:owner/name[@revision]` or `mlflow:NAME[@alias]`.

        Raises:
            InputError: If it is of no such form.
        """
        kind, colon, place = text.strip().partition(":")
        if not colon or kind not in (FOLDER, HUB, REGISTRY) or not place:
            raise InputError(f"source {text!r} is not of the form {SOURCE_FORMS}")
        try:
            if kind == FOLDER:
                place = str(Path(place).expanduser().absolute())
            elif kind == REGISTRY:
                RegisteredName.of_source(place)
            elif not is_hub_id(place):
                raise InputError("it names no repository: expected hub:owner/name or hub:owner/name@rev")
        except (InputError, OSError, RuntimeError) as error:
            raise InputError(f"source {text!r}: {error}") from error
        return cls(kind=kind, place=place)

    def __str__(self) -> str:
        """The source as it is written."""
        return f"{self.kind}:{self.place}"

    def candidates(self) -> list[Candidate]:
        """The models that are there now, in a folder or a repository.

        Raises:
            InputError: If the folder cannot be read, or the hub does not answer or has no such repository.
        """
        if self.kind == HUB:
            return [self._in_repository()]
        try:
            paths = list(_models_in(Path(self.place)))
            return [Candidate(source=str(self), reference=str(path), state=_state(path)) for path in paths]
        except OSError as error:
            raise InputError(
                f"source {self} cannot be looked at ({error.strerror or error}): check the path"
            ) from error

    def _in_repository(self) -> Candidate:
        from huggingface_hub import HfApi

        name, _, revision = self.place.partition("@")
        try:
            commit = HfApi().model_info(name, revision=revision or None, timeout=_HUB_TIMEOUT_S).sha
        except Exception as error:  # network, permission and naming errors have a dozen types
            raise InputError(
                f"source {self}: the hub does not say which revision is there: {first_line(error)}; check the network "
                "and the name"
            ) from error
        if not commit:
            raise InputError(f"source {self}: the hub names no revision: check the name")
        return Candidate(source=str(self), reference=f"{name}@{commit}", state=commit)


def _models_in(root: Path) -> Iterator[Path]:
    """GGUF files and model folders in a folder and in the folders in it; what is hidden is left out."""
    inner = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    for folder in (root, *inner):
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
        if any(path.name == "config.json" for path in files) and any(path.suffix in _WEIGHTS for path in files):
            yield folder
        yield from (path for path in files if path.suffix == ".gguf")


def _state(path: Path) -> str:
    if path.is_file():
        files = {path.name: path}
    else:
        files = {inner.name: inner for inner in path.iterdir() if inner.is_file()}
        files |= {name: path / name for name in content_files(path)}
    stats = [(name, files[name].stat()) for name in sorted(files)]
    listed = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:32]
