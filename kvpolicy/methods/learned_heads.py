"""KVP with budgets by head: the learned scores also say how many tokens a head keeps."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Int
from torch import Tensor

from kvpolicy.config.settings import Share
from kvpolicy.methods.allocation import NUM_ALWAYS_TOKENS, UNEVEN_HEADS, adaptive_budgets
from kvpolicy.methods.base import CacheState, Scores
from kvpolicy.methods.learned import LearnedPolicy
from kvpolicy.methods.ranking import budget_from_ratio


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedHeads(LearnedPolicy):
    """KVP's scores, with the budget of a global total shared among heads by the scores themselves.

    Scores are the logits of a Plackett-Luce distribution over rankings, so softmax(s) of a head is the probability that
    each token is the first choice. These shares are comparable between heads, as each head's add up to one, like the
    attention of a query. Beyond the always-kept tokens every head is sure of the share `safeguard` of the mean budget;
    the rest goes to the largest shares of all heads of a pool.

    Not in the paper, whose budgets are equal. Pool and floor are AdaKV's (arXiv 2407.11550). With the whole model as
    the pool less attention is lost at larger budgets, but fidelity suffers: a share of attention does not weigh the
    same in every layer.

    Attributes:
        safeguard: From 0 (adaptive alone) to 1 (equal budgets).
        pool: Heads that share their budget: those of a `layer`, or of the whole `model`.
    """

    name = "kvp_heads"
    description = "KV Policy, with the budget shared among heads by the learned scores"
    reference = "arXiv 2602.10238"
    recompression_obstacle = UNEVEN_HEADS

    safeguard: Share = 0.2
    pool: Literal["layer", "model"] = "layer"

    def allocate(self, state: CacheState, scores: Scores, budget: int) -> Int[Tensor, "head"]:
        """Share the budget of each pool among its heads."""
        floor = NUM_ALWAYS_TOKENS + budget_from_ratio(self.safeguard, budget - NUM_ALWAYS_TOKENS)
        num_pools = 1 if self.pool == "model" else state.num_heads // state.num_kv_heads
        return adaptive_budgets(scores.softmax(dim=-1), budget, floor=floor, num_pools=num_pools)
