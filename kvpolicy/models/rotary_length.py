"""Rotary frequencies that depend on the length of the sequence, and passes that take those of another length.

LongRoPE (arXiv 2402.13753) has two sets of frequencies: one for sequences up to the length of its first training, one
for longer ones. transformers chooses by the last position of each pass, so a cache whose entries were made in passes on
both sides of that length is turned by two sets, and what comes out is of no model. (transformers' own generation makes
the whole cache anew at that point.) So all passes of a sequence are to take the frequencies of the whole.

Dynamic NTK changes its frequencies beyond the model's positions only, where nothing is run.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvpolicy.errors import InputError
from kvpolicy.models.rotary import read_frequencies


def length_of_change(decoder: Any, max_positions: int) -> int | None:
    """Tokens of the longest sequence that has the frequencies of short ones; None if the length changes nothing.

    Args:
        decoder: Of the network.
        max_positions: Tokens of the longest sequence that the model was made for.

    Raises:
        InputError: If frequencies change at a length that the configuration does not name, or more than once.
    """
    if not _may_change(getattr(decoder, "rotary_emb", None)):
        return None
    config = decoder.config
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    places = [vars(config), parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    named = {place.get("original_max_position_embeddings") for place in places}
    lengths = sorted(length for length in named if isinstance(length, int) and 0 < length < max_positions)
    changes = [length for length in lengths if _differ(decoder, length, length + 1)]
    if len(changes) > 1 or (not changes and _differ(decoder, 1, max_positions)):
        raise InputError(
            f"architecture {config.model_type!r} changes its rotary frequencies with the length of the sequence in a "
            "way that is not supported: expected one length, original_max_position_embeddings in its configuration"
        )
    return changes[0] if changes else None


@contextmanager
def frequencies_of_length(decoder: Any, num_tokens: int) -> Iterator[None]:
    """Let passes turn queries and keys as in a sequence of `num_tokens`, however short they are themselves.

    The rotary embedding is asked for one position more, the last of that sequence, and its answer is cut off again.
    Hooks do that, and are gone afterwards.
    """
    names = list(inspect.signature(decoder.rotary_emb.forward).parameters)
    place = names.index("position_ids")

    def lengthen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = dict(zip(names, args, strict=False)) | kwargs
        positions: Tensor = given[names[place]]
        last = positions.new_full((*positions.shape[:-1], 1), num_tokens - 1)
        return (), given | {names[place]: torch.cat((positions, last), dim=-1)}

    def cut(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cos, sin = output
        return cos[..., :-1, :], sin[..., :-1, :]

    hooks = (
        decoder.rotary_emb.register_forward_pre_hook(lengthen, with_kwargs=True),
        decoder.rotary_emb.register_forward_hook(cut),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _may_change(module: nn.Module | None) -> bool:
    kinds = getattr(module, "rope_type", "")
    return any(
        "dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
    )


def _differ(decoder: Any, one: int, other: int) -> bool:
    first, second = read_frequencies(decoder, one), read_frequencies(decoder, other)
    return not (torch.equal(first.frequencies, second.frequencies) and torch.equal(first.magnitudes, second.magnitudes))
