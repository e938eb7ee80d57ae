"""Greedy decoding of a batch of caches."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvpolicy.inference.cache import Continuable
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.text.chat_format import end_ids

# Looking at an answer means detokenising it, so it is done every few tokens only.
_TOKENS_BETWEEN_LOOKS = 8


def decode_greedily(
    model: LanguageModel,
    cache: Continuable,
    first_tokens: Int[Tensor, "row"],
    *,
    first_position: int | Int[Tensor, "row"],
    max_new_tokens: int,
    is_settled: Callable[[int, list[int]], bool] = lambda row, tokens: False,
) -> list[list[int]]:
    """Continue every row greedily until all have ended, are settled, or `max_new_tokens` are there.

    Args:
        model: The language model.
        cache: The rows' caches, up to but without `first_tokens`.
        first_tokens: The first new token of each row.
        first_position: Original position of the first tokens, the same in all rows or one for each.
        max_new_tokens: Tokens that a row may have.
        is_settled: Whether more tokens of a row cannot change the result, from the row and its tokens so far.

    Returns:
        New tokens of each row, without the token that ends an answer (`kvpolicy.text.chat_format.end_ids`) and what
        follows it.
    """
    ends = torch.tensor(sorted(_end_tokens(model)), dtype=torch.long, device=first_tokens.device)
    padding = int(ends[0]) if len(ends) else 0
    answers = first_tokens[:, None]
    positions = torch.as_tensor(first_position, device="cpu").expand(len(first_tokens))[:, None]
    active = (~torch.isin(first_tokens, ends)).nonzero().flatten()
    if len(active) < cache.num_rows:
        cache.keep_rows(active)
        positions = positions[active.cpu()]
    for length in range(1, max_new_tokens):
        if not len(active):
            break
        following = cache.run(model, answers[active, -1:], positions + (length - 1), num_logits=1)[:, -1].argmax(dim=-1)
        column = torch.full_like(first_tokens, padding)  # rows that are done only get padding
        column[active] = following.to(column.device)
        answers = torch.cat([answers, column[:, None]], dim=1)
        if length % _TOKENS_BETWEEN_LOOKS == 0:
            going = ~torch.isin(answers[active], ends).any(dim=1)
            going &= torch.tensor(
                [not is_settled(row, _until_end(answers[row], ends)) for row in active.tolist()], device=going.device
            )
            if 2 * int(going.sum()) <= len(active):  # moving the caches of the rest is cheaper than running all
                cache.keep_rows(going.nonzero().flatten())
                active, positions = active[going], positions[going.cpu()]
    return [_until_end(row, ends) for row in answers]


def _end_tokens(model: LanguageModel) -> frozenset[int]:
    configuration: Any = model.network.generation_config
    return end_ids(model.tokenizer, configuration.eos_token_id)


def _until_end(row: Tensor, ends: Tensor) -> list[int]:
    at_end = torch.isin(row, ends).nonzero()
    return [int(token) for token in (row[: int(at_end[0])] if len(at_end) else row)]
