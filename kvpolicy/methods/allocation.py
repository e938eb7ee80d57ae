"""How a budget is shared among KV heads: exactly, in whole tokens.

Budgets are means over all KV heads of the model. What is shared out here always adds up to budget * heads, gives no
head more than the context and none less than its floor. Which tokens a head then keeps is kvpolicy.methods.ranking's
choice.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.errors import InputError
from kvpolicy.methods.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS, check_budget, rank_by_score

NUM_ALWAYS_TOKENS = NUM_SINK_TOKENS + NUM_RECENT_TOKENS
"""Tokens that every head keeps, whatever its budget."""

UNEVEN_HEADS = "its heads keep different numbers of entries, which are not ranked together again"
"""Why a method that shares its budget out unevenly cannot rank a cache that it compacted before."""


def adaptive_budgets(
    shares: Float[Tensor, "head token"], budget: int, *, floor: int, num_pools: int
) -> Int[Tensor, "head"]:
    """Give each head as many tokens as it has among the best of its pool (arXiv 2407.11550, algorithm 1).

    Every head is sure of its `floor` best tokens, the always-kept ones first. What is left of the pool's budget goes to
    the largest shares of all its heads together. So the budgets keep the largest sum of shares that there is under the
    floor, and they grow with the budget as long as the floor grows no faster than it.

    Args:
        shares: The worth of a token to its head, in units that the heads of a pool have in common.
        budget: Tokens that each head keeps on average.
        floor: Tokens that each head keeps at least; raised to the always-kept ones.
        num_pools: Groups of consecutive heads that share their budget: the layers, or 1 for the whole model.

    Returns:
        The budget of each head. Equal shares are taken in the order of their rank within the head, so heads that do not
        differ get the same.

    Raises:
        InputError: If the budget is below the always-kept tokens or above the context, the floor is above the budget,
            the heads do not divide into pools, or a share is NaN.
    """
    num_heads, num_tokens = shares.shape
    check_budget(budget, num_tokens)
    floor = max(floor, NUM_ALWAYS_TOKENS)
    if floor > budget:
        raise InputError(f"budgets of heads: floor is {floor} tokens, expected at most the budget, which is {budget}")
    if num_pools < 1 or num_heads % num_pools:
        raise InputError(f"budgets of heads: {num_heads} heads do not divide into {num_pools} pools")
    worth = shares.float().clone()
    worth[:, :NUM_SINK_TOKENS] = torch.inf
    worth[:, num_tokens - NUM_RECENT_TOKENS :] = torch.inf
    contested = worth.gather(1, rank_by_score(worth))[:, floor:]
    heads_of_pool = num_heads // num_pools
    # By rank first and by head second, so that a stable sort breaks ties by rank.
    pooled = contested.view(num_pools, heads_of_pool, -1).transpose(1, 2).flatten(1)
    winners = rank_by_score(pooled)[:, : heads_of_pool * (budget - floor)] % heads_of_pool
    won = torch.zeros(num_pools, heads_of_pool, dtype=torch.long, device=shares.device)
    return floor + won.scatter_add(1, winners, torch.ones_like(winners)).flatten()


def pyramid_budgets(
    budget: int, *, num_layers: int, num_tokens: int, window_tokens: int, beta: int
) -> Int[Tensor, "layer"]:
    """Budgets that fall linearly from the first layer to the last (arXiv 2406.02069, section 4.2).

    What a budget has beyond the window is B. The last layer has B // beta of it, the first one 2 B less that, and
    the layers between lie on a line, so that layers l and (last - l) have 2 B together. Where the first would have more
    than the context, it has the context and the line is that much flatter. All layers keep the window besides.

    Departures from the authors' code: layers above the middle are rounded up and their mirror images down, where that
    code rounds the step down and so does not use the whole budget; a context shorter than 2 B is shared out on the
    flatter line as well, where that code falls back to equal budgets; and a budget that is no larger than the window
    is equal for all layers, where that code refuses it.

    Args:
        budget: Tokens that each head keeps on average.
        num_layers: Layers.
        num_tokens: Tokens of the context.
        window_tokens: Last tokens that all layers keep; raised to the number of always-kept tokens.
        beta: The larger, the steeper.

    Returns:
        The budget of the heads of each layer; they add up to budget * num_layers.

    Raises:
        InputError: If the budget is below the always-kept tokens or above the context.
    """
    check_budget(budget, num_tokens)
    base = max(window_tokens, NUM_ALWAYS_TOKENS)
    shared = budget - base
    if shared <= 0:
        return torch.full((num_layers,), budget)
    last = max(shared // beta, 2 * shared - (num_tokens - base))
    fall = 2 * (shared - last)  # from the first layer to the last
    first_half = [2 * shared - last - layer * fall // max(1, num_layers - 1) for layer in range(num_layers // 2)]
    middle = [shared] * (num_layers % 2)
    second_half = [2 * shared - mirrored for mirrored in reversed(first_half)]
    return base + torch.tensor(first_half + middle + second_half)
