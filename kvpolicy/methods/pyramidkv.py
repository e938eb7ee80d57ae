"""PyramidKV: SnapKV with more tokens for the first layers than for the last."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from kvpolicy.config.settings import Positive
from kvpolicy.methods.allocation import UNEVEN_HEADS, pyramid_budgets
from kvpolicy.methods.base import CacheState, Scores
from kvpolicy.methods.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV's scores, with layer budgets that fall linearly (arXiv 2406.02069, section 4).

    All heads of a layer keep the same number of tokens. `kvpolicy.methods.allocation.pyramid_budgets` describes
    the budgets and their departures from the authors' code.

    Attributes:
        beta: The last layer has 1 / beta of the mean budget beyond the window.
    """

    name = "pyramidkv"
    description = "SnapKV, with layer budgets that fall linearly from the first layer to the last"
    reference = "arXiv 2406.02069"
    recompression_obstacle = UNEVEN_HEADS

    beta: Positive = 20

    def allocate(self, state: CacheState, scores: Scores, budget: int) -> Int[Tensor, "head"]:
        """Share the budget among layers; neither the cache nor the scores matter for it."""
        by_layer = pyramid_budgets(
            budget,
            num_layers=state.num_heads // state.num_kv_heads,
            num_tokens=state.num_tokens,
            window_tokens=self.window_tokens,
            beta=self.beta,
        )
        return by_layer.repeat_interleave(state.num_kv_heads).to(scores.device)
