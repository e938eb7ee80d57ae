"""The training objectives by name: two estimators of the policy gradient, and the ablation's supervised surrogates.

Each is one function of scores, importance and mask that gives a loss for every sequence. The loss of an objective says
nothing about another's: they are compared by the held-out eviction cost of the policies that they train.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvpolicy.objectives.exact import exact_loss
from kvpolicy.objectives.listwise import listwise_loss
from kvpolicy.objectives.pairwise import pairwise_loss
from kvpolicy.objectives.regression import log_mse_loss, mse_loss
from kvpolicy.objectives.rloo import MIN_RANKINGS, rloo_loss
from kvpolicy.objectives.soft_rank import soft_rank_loss

__all__ = ["MIN_RANKINGS", "OBJECTIVES", "Objective", "ObjectiveName", "make_objective", "objective_module"]

ObjectiveName = Literal["exact", "rloo", "mse", "log_mse", "pairwise", "listwise", "soft_rank"]
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)


Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From scores, importance (0 for padding) and mask, all (head, sequence, token), to the loss of each sequence."""

_LOSSES: Mapping[ObjectiveName, Callable[..., Tensor]] = {
    "exact": exact_loss,
    "rloo": rloo_loss,
    "mse": mse_loss,
    "log_mse": log_mse_loss,
    "pairwise": pairwise_loss,
    "listwise": listwise_loss,
    "soft_rank": soft_rank_loss,
}


def make_objective(name: ObjectiveName, *, num_rankings: int, generator: torch.Generator) -> Objective:
    """The objective of that name.

    Args:
        name: One of `OBJECTIVES`.
        num_rankings: Rankings that `rloo` draws for each sequence.
        generator: Source of what `rloo` and `pairwise` draw.
    """
    loss = _LOSSES[name]
    offered: dict[str, Any] = {"num_rankings": num_rankings, "generator": generator}
    taken = offered.keys() & inspect.signature(loss).parameters.keys()
    return partial(loss, **{parameter: offered[parameter] for parameter in taken})


def objective_module(name: ObjectiveName) -> str:
    """Name of the module whose code an objective is."""
    return _LOSSES[name].__module__
