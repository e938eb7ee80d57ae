"""The training objectives by name: two estimators of the policy gradient, and the ablation's supervised surrogates.

Each is one function of scores, importance and mask that gives a loss for every sequence. The loss of an objective says
nothing about another's: they are compared by the held-out eviction cost of the policies that they train.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpolicy.config.registry import Registry
from kvpolicy.objectives.exact import exact_loss
from kvpolicy.objectives.listwise import listwise_loss
from kvpolicy.objectives.pairwise import pairwise_loss
from kvpolicy.objectives.regression import log_mse_loss, mse_loss
from kvpolicy.objectives.rloo import MIN_RANKINGS, rloo_loss
from kvpolicy.objectives.soft_rank import soft_rank_loss

__all__ = ["MIN_RANKINGS", "OBJECTIVES", "Objective", "make_objective"]

Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From scores, importance (0 for padding) and mask, all (head, sequence, token), to the loss of each sequence."""

OBJECTIVES: Registry[Callable[..., Tensor]] = Registry(
    "objective",
    {
        "exact": exact_loss,
        "rloo": rloo_loss,
        "mse": mse_loss,
        "log_mse": log_mse_loss,
        "pairwise": pairwise_loss,
        "listwise": listwise_loss,
        "soft_rank": soft_rank_loss,
    },
    check=lambda name, loss: "" if callable(loss) else "it is not a function",
)


def make_objective(name: str, *, num_rankings: int, generator: torch.Generator) -> Objective:
    """The objective of that name.

    Args:
        name: One of `OBJECTIVES.names`.
        num_rankings: Rankings that `rloo` draws for each sequence.
        generator: Source of what `rloo` and `pairwise` draw.

    Raises:
        InputError: If there is none of that name.
    """
    loss = OBJECTIVES[name]
    offered: dict[str, Any] = {"num_rankings": num_rankings, "generator": generator}
    taken = offered.keys() & inspect.signature(loss).parameters.keys()
    return partial(loss, **{parameter: offered[parameter] for parameter in taken})
