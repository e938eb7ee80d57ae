"""Soft tokens, as they are saved, shipped and used: what Judge Q appends to a prompt (arXiv 2509.10798).

On disk they are a folder of `soft_tokens.safetensors` (the embeddings) and `soft_tokens.json` (shape, training and the
model that they were trained for). Their digest covers both, so equal training gives an equal id. Training them is
kvpolicy.training.soft_token_training's, ranking with them kvpolicy.methods.judgeq's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from kvpolicy.config.specs import ModelSpec
from kvpolicy.policies.saved import SavedKind, Trained

WEIGHTS = "soft_tokens.safetensors"
RECORD = "soft_tokens.json"
SAVED = SavedKind(name="soft tokens", weights=WEIGHTS, record=RECORD, version=1)
_EMBEDDINGS = "embeddings"


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftTokens(Trained):
    """Trained embeddings that take the place of tokens at the end of a context.

    Attributes:
        embeddings: In float32, in the order in which they are run.
    """

    saved: ClassVar[SavedKind] = SAVED

    embeddings: Float[Tensor, "probe width"]

    def tensors(self) -> Mapping[str, Tensor]:
        """The embeddings."""
        return {_EMBEDDINGS: self.embeddings}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], record: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
        """The embeddings."""
        return {"embeddings": tensors[_EMBEDDINGS]}


def load_soft_tokens(folder: Path, *, device: str = "cpu") -> SoftTokens:
    """Load saved soft tokens.

    Raises:
        InputError: If the folder holds none, or some of another format.
    """
    return SoftTokens.load(folder, device=device)
