"""From scores to rankings, and from rankings to the entries that a budget keeps.

Methods only score and the cache only compacts; this is the one place that selects. Every selection goes through a
stable sort, so tied scores never scramble the order: of two equal scores the earlier token ranks first, on every device
and at every compression.

Not for scoring (kvpolicy.methods) nor for moving tensors (kvpolicy.inference.cache).
"""

import math
from decimal import ROUND_HALF_UP, Decimal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.errors import InputError

NUM_SINK_TOKENS = 4
"""First tokens of a context that every budget keeps."""

NUM_RECENT_TOKENS = 16
"""Last tokens of a context that every budget keeps."""

NOT_KEPT = -1
"""Stands, on the left, for what a head keeps less than another one does."""


def rank_by_score(scores: Float[Tensor, "*batch token"]) -> Int[Tensor, "*batch token"]:
    """Order tokens from the one kept longest to the one evicted first.

    Args:
        scores: Higher is kept longer. Infinities are allowed.

    Returns:
        Token indices by descending score; of equal scores the lower index comes first.

    Raises:
        InputError: If a score is NaN, which has no place in an order.
    """
    if torch.isnan(scores).any():
        num_nan = int(torch.isnan(scores).sum())
        raise InputError(f"scores: {num_nan} of {scores.numel()} are NaN, expected numbers; check the method's scores")
    return torch.argsort(scores, dim=-1, descending=True, stable=True)


def kept_positions(
    scores: Float[Tensor, "head token"],
    budget: int | Int[Tensor, "head"],
    *,
    num_sink_tokens: int = NUM_SINK_TOKENS,
    num_recent_tokens: int = NUM_RECENT_TOKENS,
) -> Int[Tensor, "head most"]:
    """Choose the tokens that each head keeps.

    The first and the last tokens are kept whatever their score and count towards the budget; the rest of the
    budget goes to the best scores between them. The sets are nested: what a budget keeps, every larger one keeps.

    Args:
        scores: Higher is kept longer.
        budget: Tokens that each head keeps: one number for all, or one for each.
        num_sink_tokens: First tokens that are always kept.
        num_recent_tokens: Last tokens that are always kept.

    Returns:
        Indices into the token dimension, ascending within each head. Heads that keep fewer than the one that keeps most
        have NOT_KEPT on the left, so that the last entries of all heads are their last tokens.

    Raises:
        InputError: If a budget is below the always-kept tokens or above the context, or if a score
            between them is NaN.
    """
    num_heads, num_tokens = scores.shape
    if num_sink_tokens < 0 or num_recent_tokens < 0:
        raise InputError(
            f"always-kept tokens: {num_sink_tokens} first and {num_recent_tokens} last, expected at least 0 of each"
        )
    least, most = (budget, budget) if isinstance(budget, int) else (int(budget.min()), int(budget.max()))
    for bound in (least, most):
        check_budget(bound, num_tokens, num_sink_tokens=num_sink_tokens, num_recent_tokens=num_recent_tokens)
    num_always, end = num_sink_tokens + num_recent_tokens, num_tokens - num_recent_tokens
    best = rank_by_score(scores[:, num_sink_tokens:end])[:, : most - num_always] + num_sink_tokens
    if least < most:
        assert isinstance(budget, Tensor)
        ranks = torch.arange(most - num_always, device=scores.device)
        best = best.masked_fill(ranks >= budget.to(scores.device)[:, None] - num_always, NOT_KEPT)
    sinks = torch.arange(num_sink_tokens, device=scores.device).expand(num_heads, -1)
    recents = torch.arange(end, num_tokens, device=scores.device).expand(num_heads, -1)
    return torch.cat((sinks, best, recents), dim=-1).sort(dim=-1).values


def retention_ranks(
    scores: Float[Tensor, "head token"],
    *,
    num_sink_tokens: int = NUM_SINK_TOKENS,
    num_recent_tokens: int = NUM_RECENT_TOKENS,
) -> Int[Tensor, "head token"]:
    """Rank tokens by how long each is kept as the budget shrinks: `kept_positions` inverted, for all budgets at once.

    The always-kept tokens rank first, in the order of their positions, and the others follow by score. So a head that
    keeps b tokens keeps exactly those with ranks up to b.

    Args:
        scores: Higher is kept longer.
        num_sink_tokens: First tokens that are always kept.
        num_recent_tokens: Last tokens that are always kept.

    Returns:
        Ranks from 1, each once in a head.

    Raises:
        InputError: If the context is shorter than the always-kept tokens, or a score between them is NaN.
    """
    num_heads, num_tokens = scores.shape
    check_budget(num_tokens, num_tokens, num_sink_tokens=num_sink_tokens, num_recent_tokens=num_recent_tokens)
    end = num_tokens - num_recent_tokens
    places = torch.arange(num_tokens, device=scores.device).expand(num_heads, -1)
    best = rank_by_score(scores[:, num_sink_tokens:end]) + num_sink_tokens
    order = torch.cat((places[:, :num_sink_tokens], places[:, end:], best), dim=-1)
    return torch.empty_like(order).scatter_(1, order, places + 1)


def check_budget(
    budget: int,
    num_tokens: int,
    *,
    num_sink_tokens: int = NUM_SINK_TOKENS,
    num_recent_tokens: int = NUM_RECENT_TOKENS,
) -> None:
    """Refuse a budget that cannot be kept of a context.

    Raises:
        InputError: If it is below the always-kept tokens or above the context.
    """
    num_always = num_sink_tokens + num_recent_tokens
    if not num_always <= budget <= num_tokens:
        raise InputError(
            f"budget: {budget} tokens, expected from {num_always} (the {num_sink_tokens} first and {num_recent_tokens} "
            f"last are always kept) to {num_tokens} (the context); choose a budget in that range"
        )


def check_allocation(allocation: int | Int[Tensor, "head"], budget: int, *, num_heads: int, num_tokens: int) -> None:
    """Refuse a way to share a budget among heads that gives out another number of tokens, or that cannot be kept.

    Args:
        allocation: Tokens that each head keeps: one number for all, or one for each.
        budget: Tokens that a head keeps on average.
        num_heads: Heads that share.
        num_tokens: Tokens of the context.

    Raises:
        InputError: If the sum is not `budget * num_heads`, or a head gets less than the always-kept tokens or more than
            the context.
    """
    shares = torch.full((num_heads,), allocation) if isinstance(allocation, int) else allocation
    if int(shares.sum()) != budget * num_heads or shares.shape[0] != num_heads:
        raise InputError(
            f"allocation: {int(shares.sum())} tokens for {shares.shape[0]} heads, expected {budget * num_heads} for "
            f"{num_heads} (the budget of {budget} each on average); share out neither more nor less"
        )
    for bound in (int(shares.min()), int(shares.max())):
        check_budget(bound, num_tokens)


def budget_from_ratio(ratio: float, num_tokens: int) -> int:
    """Turn the share of tokens to keep into a budget, rounding half up.

    The product is taken in decimal, on the number as a person writes it: 0.1 of 10 tokens is 1, where truncating
    `int(10 * (1 - 0.9))` would keep 0.

    Args:
        ratio: Share of the tokens to keep, from 0 to 1.
        num_tokens: Tokens of the context.

    Returns:
        Tokens to keep.

    Raises:
        InputError: If the ratio is not a number from 0 to 1 or the context has a negative length.
    """
    if not (math.isfinite(ratio) and 0.0 <= ratio <= 1.0):
        raise InputError(f"ratio: {ratio}, expected the share of tokens to keep, from 0 to 1")
    if num_tokens < 0:
        raise InputError(f"num_tokens: {num_tokens}, expected at least 0")
    product = Decimal(str(float(ratio))) * num_tokens
    return int(product.quantize(Decimal(1), rounding=ROUND_HALF_UP))
