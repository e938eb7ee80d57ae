"""Soft tokens, as they are saved, shipped and used: what Judge Q appends to a prompt (arXiv 2509.10798).

On disk they are a folder of `soft_tokens.safetensors` (the embeddings) and `soft_tokens.json` (shape, training and the
model that they were trained for). Their digest covers both, so equal training gives an equal id. Training them is
kvpolicy.soft_token_training's, ranking with them kvpolicy.methods.judgeq's.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError
from kvpolicy.specs import ModelSpec

FORMAT_VERSION = 1
WEIGHTS = "soft_tokens.safetensors"
RECORD = "soft_tokens.json"
_EMBEDDINGS = "embeddings"


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftTokens:
    """Trained embeddings that take the place of tokens at the end of a context.

    Attributes:
        embeddings: In float32, in the order in which they are run.
        spec: Shape of the model.
        model_digest: Of the model that they were trained for; see `require_model`.
        training: What they were trained with, for people: seed, steps, response, losses.
    """

    embeddings: Float[Tensor, "probe width"]
    spec: ModelSpec
    model_digest: str
    training: dict[str, Any]

    def require_model(self, digest: str) -> None:
        """Refuse a model that the soft tokens were not trained for.

        Raises:
            InputError: If the digests differ.
        """
        if digest != self.model_digest:
            raise InputError(
                f"soft tokens were trained for model {self.model_digest[:16]}, not for {digest[:16]}: "
                "use that model, or train soft tokens for this one"
            )

    def save(self, folder: Path) -> str:
        """Write the soft tokens into `folder` and return their digest.

        Returns:
            SHA-256 over embeddings and record.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({_EMBEDDINGS: self.embeddings.detach().cpu().contiguous()}, folder / WEIGHTS)
        record = {
            "format_version": FORMAT_VERSION,
            "model": asdict(self.spec),
            "model_digest": self.model_digest,
            "training": self.training,
            "weights_sha256": digest_file(folder / WEIGHTS),
        }
        (folder / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True))
        return soft_tokens_digest(folder)


def soft_tokens_digest(folder: Path) -> str:
    """SHA-256 over the embeddings and the record of saved soft tokens."""
    contents = hashlib.sha256()
    for name in (WEIGHTS, RECORD):
        contents.update((folder / name).read_bytes())
    return contents.hexdigest()


def load_soft_tokens(folder: Path, *, device: str = "cpu") -> SoftTokens:
    """Load saved soft tokens.

    Raises:
        InputError: If the folder holds none, or some of another format.
    """
    from safetensors.torch import load_file

    try:
        record = json.loads((folder / RECORD).read_text())
        if record["format_version"] != FORMAT_VERSION:
            raise InputError(
                f"soft tokens {folder} have format {record['format_version']}, this version reads {FORMAT_VERSION}: "
                "use the kvpolicy version that made them"
            )
        if digest_file(folder / WEIGHTS) != record["weights_sha256"]:
            raise InputError(f"soft tokens {folder}: {WEIGHTS} is not what {RECORD} says: delete them and train again")
        return SoftTokens(
            embeddings=load_file(folder / WEIGHTS)[_EMBEDDINGS].to(device),
            spec=ModelSpec(**record["model"]),
            model_digest=record["model_digest"],
            training=record["training"],
        )
    except InputError:
        raise
    except Exception as error:  # a missing, cut or foreign file fails in many ways that mean the same
        raise InputError(
            f"soft tokens {folder} cannot be read ({type(error).__name__}): it must be a folder of {RECORD} and "
            f"{WEIGHTS} that SoftTokens.save wrote; delete it and train again"
        ) from error
