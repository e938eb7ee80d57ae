"""KeyDiff: distinctive keys attract attention."""

from dataclasses import dataclass

from torch.nn import functional

from kvpolicy.methods.base import CacheState, Method, Scores


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Method):
    """The negative cosine between a key and the mean of the unit keys of its head (arXiv 2504.15364, section 3).

    Linear in the number of tokens: the paper's form with one anchor, which stands for all pairwise cosines.
    """

    name = "keydiff"
    description = "Keeps the keys that differ most from the mean direction of all keys"
    reference = "arXiv 2504.15364"

    def score(self, state: CacheState) -> Scores:
        """Score by −cos(k, mean of k/‖k‖)."""
        unit_keys = functional.normalize(state.keys.float(), dim=-1)
        anchor = functional.normalize(unit_keys.mean(dim=1), dim=-1)
        return -(unit_keys @ anchor.unsqueeze(-1)).squeeze(-1)
