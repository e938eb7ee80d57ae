"""A model's rotary embedding, with the proof that its queries are turned by it."""

import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.errors import InputError
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.models.rotary import Rotary, read_frequencies, turn_back

_PROBE_TOKENS = 8
_PROBE_TOLERANCE = 0.1  # of a query's norm; another layout is off by about all of it, bfloat16 by a hundredth


def read_rotary(model: LanguageModel, num_tokens: int) -> Rotary:
    """Read a model's rotary embedding, as it is in a pass over `num_tokens` tokens.

    A pass over a few equal tokens, whose queries differ by nothing but their position, proves that turning back gives
    what the model turned.

    Raises:
        InputError: If the model has no rotary embedding where transformers' decoders keep theirs, or one of another
            layout, or layers without.
    """
    rotary = read_frequencies(model.decoder, num_tokens)
    _require_queries_turn_back(model.for_sequence(_PROBE_TOKENS), read_frequencies(model.decoder, _PROBE_TOKENS))
    return rotary


def _require_queries_turn_back(model: LanguageModel, rotary: Rotary) -> None:
    """Equal tokens have equal values, so their hidden states are equal in every layer, and so are their queries."""
    vocabulary = model.embedding_table.shape[0]
    queries = prefill(model, torch.full((_PROBE_TOKENS,), vocabulary // 2), num_queries=_PROBE_TOKENS).queries
    positions = torch.arange(_PROBE_TOKENS, device=queries.device)[None]
    cos, sin = rotary.cos_sin(positions, num_heads=model.spec.num_heads)
    turned_back = turn_back(queries.float(), cos[:, None], sin[:, None])
    error = (turned_back - turned_back[:, :, :1]).norm(dim=-1) / turned_back[:, :, :1].norm(dim=-1)
    by_layer = error.view(model.spec.num_layers, -1).amax(dim=1)
    if wrong := (~(by_layer < _PROBE_TOLERANCE)).nonzero().flatten().tolist():
        raise InputError(
            f"layers {', '.join(map(str, wrong))} of {model.spec.num_layers} do not turn their queries as the model's "
            "rotary embedding says (another layout of channels, or no positions): use a method that needs no rotary"
        )
