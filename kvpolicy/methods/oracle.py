"""The ceiling: the order that no method can beat on eviction cost."""

from dataclasses import dataclass

from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, Method, Scores


@dataclass(frozen=True, kw_only=True)
class Oracle(Method):
    """True importance: the attention that the future pays. It sees the answer, so it is a bound, not a method."""

    name = "oracle"
    description = "Keeps what the future will attend to (a bound: it sees the answer)"
    reference = "none"
    recompression_obstacle = "it ranks by the attention of a future that has not been read yet"
    needs_importance = True

    def score(self, state: CacheState) -> Scores:
        """Score by importance."""
        if state.importance is None:
            raise InputError(
                f"method {self.name}: no importance in the cache state, expected one value a head and token"
            )
        return state.importance.float()
