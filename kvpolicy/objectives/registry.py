"""The training objectives by name: two estimators of the policy gradient, and the ablation's supervised surrogates.

Each is one function of scores, importance and mask that gives a loss for every sequence. The loss of an objective says
nothing about another's: they are compared by the held-out eviction cost of the policies that they train.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from kvpolicy.objectives.exact import exact_loss
from kvpolicy.objectives.listwise import listwise_loss
from kvpolicy.objectives.pairwise import pairwise_loss
from kvpolicy.objectives.regression import log_mse_loss, mse_loss
from kvpolicy.objectives.rloo import rloo_loss
from kvpolicy.objectives.soft_rank import soft_rank_loss

ObjectiveName = Literal["exact", "rloo", "mse", "log_mse", "pairwise", "listwise", "soft_rank"]
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)


Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From scores, importance (0 for padding) and mask, all (head, sequence, token), to the loss of each sequence."""


def make_objective(name: ObjectiveName, *, num_rankings: int, generator: torch.Generator) -> Objective:
    """The objective of that name.

    Args:
        name: One of `OBJECTIVES`.
        num_rankings: Rankings that `rloo` draws for each sequence.
        generator: Source of what `rloo` and `pairwise` draw.
    """
    objectives: dict[ObjectiveName, Objective] = {
        "exact": exact_loss,
        "rloo": partial(rloo_loss, num_rankings=num_rankings, generator=generator),
        "mse": mse_loss,
        "log_mse": log_mse_loss,
        "pairwise": partial(pairwise_loss, generator=generator),
        "listwise": listwise_loss,
        "soft_rank": soft_rank_loss,
    }
    return objectives[name]
