"""Anything that was trained for a model, on disk: a folder of weights (safetensors) and a record (JSON), one digest.

The digest covers both files, so equal training gives an equal id. A folder that was cut, changed or is of another
version is one clear error.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from kvpolicy.config.specs import ModelSpec
from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError

Made = TypeVar("Made", bound="Trained")


@dataclass(frozen=True, kw_only=True)
class SavedKind:
    """How one kind of thing is saved.

    Attributes:
        name: In errors.
        weights: Name of the file of weights.
        record: Name of the file of everything else.
        version: Version of this format.
    """

    name: str
    weights: str
    record: str
    version: int

    def digest(self, folder: Path) -> str:
        """SHA-256 over the weights and the record in a folder."""
        contents = hashlib.sha256()
        for name in (self.weights, self.record):
            contents.update((folder / name).read_bytes())
        return contents.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Trained(ABC):
    """Something that was trained for one model.

    Attributes:
        saved: How it is saved.
        spec: Shape of the model.
        model_digest: Digest of the model; see `require_model`.
        training: How it was trained, for people: seed, objective, trace snapshot, losses.
    """

    saved: ClassVar[SavedKind]
    spec: ModelSpec
    model_digest: str
    training: dict[str, Any]

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """The weights."""

    def settings(self) -> dict[str, Any]:
        """Further entries of the record, which loading needs."""
        return {}

    @classmethod
    @abstractmethod
    def restore(cls, tensors: dict[str, Tensor], record: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
        """The fields of the class, from saved weights and record."""

    def require_model(self, digest: str) -> None:
        """Refuse a model that this was not trained for.

        Raises:
            InputError: If the digests differ.
        """
        if digest != self.model_digest:
            raise InputError(
                f"{self.saved.name} was trained for model {self.model_digest[:16]}, not for {digest[:16]}: use that "
                "model, or train for this one"
            )

    def save(self, folder: Path) -> str:
        """Write weights and record into a folder, which is made if missing.

        Returns:
            SHA-256 over weights and record.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        save_file(weights, folder / self.saved.weights)
        record = {
            **self.settings(),
            "format_version": self.saved.version,
            "model": asdict(self.spec),
            "model_digest": self.model_digest,
            "training": dict(self.training),
            "weights_sha256": digest_file(folder / self.saved.weights),
        }
        (folder / self.saved.record).write_text(json.dumps(record, indent=1, sort_keys=True))
        return self.saved.digest(folder)

    @classmethod
    def load(cls: type[Made], folder: Path, *, device: str = "cpu") -> Made:
        """Read a folder.

        Raises:
            InputError: If the folder holds none of this kind, or one of another version or shape.
        """
        from safetensors.torch import load_file

        saved = cls.saved
        try:
            record = json.loads((folder / saved.record).read_text())
            if record["format_version"] != saved.version:
                raise InputError(
                    f"{saved.name} {folder} has format {record['format_version']}, this version reads {saved.version}: "
                    "use the kvpolicy version that made it"
                )
            if digest_file(folder / saved.weights) != record["weights_sha256"]:
                raise InputError(
                    f"{saved.name} {folder}: {saved.weights} is not what {saved.record} says: delete it and train again"
                )
            if not (isinstance(record["model_digest"], str) and isinstance(record["training"], dict)):
                raise TypeError("model_digest is a text and training an object")
            spec = ModelSpec(**record["model"])
            fields = cls.restore(load_file(folder / saved.weights, device=device), record, spec)
            return cls(spec=spec, model_digest=record["model_digest"], training=record["training"], **fields)
        except InputError:
            raise
        except Exception as error:  # a missing, cut or foreign file fails in many ways that mean the same
            raise InputError(
                f"{saved.name} {folder} cannot be read ({type(error).__name__}): it must be a folder of {saved.record} "
                f"and {saved.weights} that `kvp train` wrote; delete it and train again"
            ) from error
