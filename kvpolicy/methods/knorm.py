"""K-Norm: keys of small norm attract attention."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvpolicy.methods.base import CacheState, Method


@dataclass(frozen=True, kw_only=True)
class KNorm(Method):
    """The negative L2 norm of the key (arXiv 2406.11430).

    Departure: the paper leaves the first two layers uncompressed; here every layer has the same budget.
    """

    name: ClassVar[str] = "knorm"
    description: ClassVar[str] = "Keeps the keys of smallest L2 norm"
    reference: ClassVar[str] = "arXiv 2406.11430"

    def score(self, state: CacheState) -> Float[Tensor, "head token"]:
        """Score by −‖k‖₂."""
        return -state.keys.float().square().sum(dim=-1).sqrt()
