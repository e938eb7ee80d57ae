"""Soft tokens, as they are saved, shipped and used: what Judge Q appends to a prompt (arXiv 2509.10798).

On disk they are a folder of `soft_tokens.safetensors` (the embeddings) and `soft_tokens.json` (shape, training and the
model that they were trained for). Their digest covers both, so equal training gives an equal id. Training them is
kvpolicy.training.soft_token_training's, ranking with them kvpolicy.methods.judgeq's.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvpolicy.config.specs import ModelSpec
from kvpolicy.policies.saved import SavedKind

WEIGHTS = "soft_tokens.safetensors"
RECORD = "soft_tokens.json"
SAVED = SavedKind(name="soft tokens", weights=WEIGHTS, record=RECORD, version=1)
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
        SAVED.require_model(self.model_digest, digest)

    def save(self, folder: Path) -> str:
        """Write the soft tokens into `folder` and return their digest.

        Returns:
            SHA-256 over embeddings and record.
        """
        return SAVED.save(
            folder,
            {_EMBEDDINGS: self.embeddings},
            spec=self.spec,
            model_digest=self.model_digest,
            training=self.training,
            more={},
        )


def load_soft_tokens(folder: Path, *, device: str = "cpu") -> SoftTokens:
    """Load saved soft tokens.

    Raises:
        InputError: If the folder holds none, or some of another format.
    """

    def build(tensors: dict[str, Tensor], record: dict[str, Any], spec: ModelSpec) -> SoftTokens:
        return SoftTokens(
            embeddings=tensors[_EMBEDDINGS], spec=spec, model_digest=record["model_digest"], training=record["training"]
        )

    return SAVED.load(folder, build, device=device)
