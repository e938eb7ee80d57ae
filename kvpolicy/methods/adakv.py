"""AdaKV: SnapKV with more tokens for the heads of a layer whose attention is spread."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from kvpolicy.config.settings import Share
from kvpolicy.methods.allocation import UNEVEN_HEADS, adaptive_budgets
from kvpolicy.methods.base import CacheState, Scores
from kvpolicy.methods.ranking import budget_from_ratio
from kvpolicy.methods.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """SnapKV's scores, with a layer's budget shared among its heads by their best scores (arXiv 2407.11550).

    Beyond the window, every head is sure of the share `safeguard` of the mean budget; the rest goes to the largest
    scores of all heads of the layer. A budget that is no larger than the window is equal for all heads.

    Departures: the paper's algorithm 2 mixes the adaptive budgets with equal ones (`safeguard` is the weight of the
    equal ones) and rounds; here the safeguard is a floor, as in the field's reference implementation, so that whole
    tokens add up. Heads of a group are averaged (as in SnapKV).

    Attributes:
        safeguard: The paper's alpha, from 0 (adaptive alone) to 1 (equal budgets).
    """

    name = "adakv"
    description = "SnapKV, with a layer's budget shared among its heads by their best scores"
    reference = "arXiv 2407.11550"
    recompression_obstacle = UNEVEN_HEADS

    safeguard: Share = 0.2

    def allocate(self, state: CacheState, scores: Scores, budget: int) -> Int[Tensor, "head"]:
        """Share each layer's budget among its heads."""
        window = min(self.window_tokens, budget)
        floor = window + budget_from_ratio(self.safeguard, budget - window)
        return adaptive_budgets(scores, budget, floor=floor, num_pools=state.num_heads // state.num_kv_heads)
