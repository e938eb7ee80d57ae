"""K-Norm: keys of small norm attract attention."""

from dataclasses import dataclass

from kvpolicy.methods.base import CacheState, Method, Scores


@dataclass(frozen=True, kw_only=True)
class KNorm(Method):
    """The negative L2 norm of the key (arXiv 2406.11430).

    Departure: the paper leaves the first two layers uncompressed; here every layer has the same budget.
    """

    name = "knorm"
    description = "Keeps the keys of smallest L2 norm"
    reference = "arXiv 2406.11430"

    def score(self, state: CacheState) -> Scores:
        """Score by −‖k‖₂."""
        return -state.keys.float().square().sum(dim=-1).sqrt()
