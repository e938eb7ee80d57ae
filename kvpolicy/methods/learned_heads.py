"""KVP with budgets by head: the learned scores also say how many tokens a head keeps."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.methods.allocation import NUM_ALWAYS_TOKENS, UNEVEN_HEADS, adaptive_budgets
from kvpolicy.methods.base import CacheState, require_share
from kvpolicy.methods.learned import LearnedPolicy
from kvpolicy.ranking import budget_from_ratio


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedHeads(LearnedPolicy):
    """KVP's scores, with one budget for the whole model that is shared among its heads by the scores themselves.

    Scores are the logits of a Plackett-Luce distribution over rankings, so softmax(s) of a head is the probability that
    each token is the first choice. These shares are comparable between heads, as each head's add up to one, like the
    attention of a query. Beyond the always-kept tokens every head is sure of the share `safeguard` of the mean budget;
    the rest goes to the largest shares of all heads of the model.

    Not in the paper, whose budgets are equal. The floor is AdaKV's (arXiv 2407.11550), whose pool is one layer.

    Attributes:
        safeguard: From 0 (adaptive alone) to 1 (equal budgets).
    """

    name: ClassVar[str] = "kvp_heads"
    description: ClassVar[str] = "KV Policy, with the budget shared among all heads by the learned scores"
    reference: ClassVar[str] = "arXiv 2602.10238"
    recompression_obstacle: ClassVar[str | None] = UNEVEN_HEADS

    safeguard: float = 0.2

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            InputError: If the safeguard is not a share.
        """
        require_share(self.name, safeguard=self.safeguard)

    def allocate(self, state: CacheState, scores: Float[Tensor, "head token"], budget: int) -> Int[Tensor, "head"]:
        """Share the budget of the whole model among its heads."""
        floor = NUM_ALWAYS_TOKENS + budget_from_ratio(self.safeguard, budget - NUM_ALWAYS_TOKENS)
        return adaptive_budgets(scores.softmax(dim=-1), budget, floor=floor, num_pools=1)
