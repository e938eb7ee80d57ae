"""What was trained for a model, on disk: a folder of weights (safetensors) and a record (JSON), with one digest.

The digest covers both files, so equal training gives an equal id. A folder that was cut, changed or is of another
version is one clear error.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from kvpolicy.config.specs import ModelSpec
from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class SavedKind:
    """How one kind of thing is saved.

    Attributes:
        name: In errors.
        weights: Name of the file of weights.
        record: Name of the file of everything else.
        version: Of this format.
    """

    name: str
    weights: str
    record: str
    version: int

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        *,
        spec: ModelSpec,
        model_digest: str,
        training: Mapping[str, Any],
        more: Mapping[str, Any],
    ) -> str:
        """Write weights and record into a folder, and return their digest.

        Args:
            folder: Made if it is not there.
            tensors: The weights.
            spec: Shape of the model that they were trained for.
            model_digest: Of that model.
            training: What they were trained with, for people.
            more: What else loading needs.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(weights, folder / self.weights)
        record = {
            **more,
            "format_version": self.version,
            "model": asdict(spec),
            "model_digest": model_digest,
            "training": dict(training),
            "weights_sha256": digest_file(folder / self.weights),
        }
        (folder / self.record).write_text(json.dumps(record, indent=1, sort_keys=True))
        return self.digest(folder)

    def digest(self, folder: Path) -> str:
        """SHA-256 over the weights and the record in a folder."""
        contents = hashlib.sha256()
        for name in (self.weights, self.record):
            contents.update((folder / name).read_bytes())
        return contents.hexdigest()

    def load(
        self, folder: Path, build: Callable[[dict[str, Tensor], dict[str, Any], ModelSpec], Made], *, device: str
    ) -> Made:
        """Read a folder and build what is in it from tensors, record and shape.

        Raises:
            InputError: If the folder holds none of this kind, or one of another version or shape.
        """
        from safetensors.torch import load_file

        try:
            record = json.loads((folder / self.record).read_text())
            if record["format_version"] != self.version:
                raise InputError(
                    f"{self.name} {folder} has format {record['format_version']}, this version reads {self.version}: "
                    "use the kvpolicy version that made it"
                )
            if digest_file(folder / self.weights) != record["weights_sha256"]:
                raise InputError(
                    f"{self.name} {folder}: {self.weights} is not what {self.record} says: delete it and train again"
                )
            if not (isinstance(record["model_digest"], str) and isinstance(record["training"], dict)):
                raise TypeError("model_digest is a text and training an object")
            return build(load_file(folder / self.weights, device=device), record, ModelSpec(**record["model"]))
        except InputError:
            raise
        except Exception as error:  # a missing, cut or foreign file fails in many ways that mean the same
            raise InputError(
                f"{self.name} {folder} cannot be read ({type(error).__name__}): it must be a folder of {self.record} "
                f"and {self.weights} that `kvp train` wrote; delete it and train again"
            ) from error

    def require_model(self, trained_for: str, digest: str) -> None:
        """Refuse a model that something was not trained for.

        Raises:
            InputError: If the digests differ.
        """
        if digest != trained_for:
            raise InputError(
                f"{self.name} was trained for model {trained_for[:16]}, not for {digest[:16]}: use that model, or "
                "train for this one"
            )
