"""The ceiling: the order that no method can beat on eviction cost."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, Method


@dataclass(frozen=True, kw_only=True)
class Oracle(Method):
    """True importance: the attention that the future pays. It sees the answer, so it is a bound, not a method."""

    name: ClassVar[str] = "oracle"
    description: ClassVar[str] = "Keeps what the future will attend to (a bound: it sees the answer)"
    reference: ClassVar[str] = "none"
    recompression_obstacle: ClassVar[str | None] = "it ranks by the attention of a future that has not been read yet"
    needs_importance: ClassVar[bool] = True

    def score(self, state: CacheState) -> Float[Tensor, "head token"]:
        """Score by importance."""
        if state.importance is None:
            raise InputError(
                f"method {self.name}: no importance in the cache state, expected one value a head and token"
            )
        return state.importance.float()
