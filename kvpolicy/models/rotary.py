"""Rotary position embeddings as a value: the frequencies that a model turns its queries and keys with.

A rotary embedding turns pairs of channels by angles that grow with the position (arXiv 2104.09864). Channels j and
j + `pair` of the first 2 * `pair` channels make a pair (the layout of Llama and its kin, "rotate half"); channels after
them are left alone (partial rotary embeddings, as in Phi-4-mini). With m the magnitude that YaRN and LongRoPE put on
top (1 otherwise):

    q'_j          = m * (q_j cos(position * frequency_j) - q_{j+pair} sin(position * frequency_j))
    q'_{j+pair}   = m * (q_{j+pair} cos(position * frequency_j) + q_j sin(position * frequency_j))

Legend: head = KV heads of the whole model, layer-major; row = 1, or one a head.
"""

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """What turns the queries and keys of a model.

    Attributes:
        frequencies: Radians per position of every pair; one row if all layers have the same.
        magnitudes: Factor on the turned channels, for each row of `frequencies`.
    """

    frequencies: Float[Tensor, "layer pair"]
    magnitudes: Float[Tensor, "layer"]

    def cos_sin(
        self, positions: Int[Tensor, "shared token"], *, num_heads: int
    ) -> tuple[Float[Tensor, "row token pair"], Float[Tensor, "row token pair"]]:
        """Cosines and sines of the angles at some positions, times the magnitude, in float32.

        Args:
            positions: One row for all heads or one for each.
            num_heads: KV heads of the whole model; where layers differ there is a row for each of them.
        """
        num_layers = self.frequencies.shape[0]
        repeats = 1 if num_layers == 1 else num_heads // num_layers
        frequencies = self.frequencies.to(positions.device).repeat_interleave(repeats, dim=0)
        magnitudes = self.magnitudes.to(positions.device).repeat_interleave(repeats)[:, None, None]
        angles = positions[..., None].float() * frequencies[:, None]
        return angles.cos() * magnitudes, angles.sin() * magnitudes


def turn(
    states: Float[Tensor, "*batch dim"], cos: Float[Tensor, "*#batch pair"], sin: Float[Tensor, "*#batch pair"]
) -> Float[Tensor, "*batch dim"]:
    """Multiply each pair of channels by [[cos, -sin], [sin, cos]], which need not be a rotation (as a mean of some)."""
    num_pairs = cos.shape[-1]
    first, second = states[..., :num_pairs], states[..., num_pairs : 2 * num_pairs]
    rest = states[..., 2 * num_pairs :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def turn_back(
    states: Float[Tensor, "*batch dim"], cos: Float[Tensor, "*#batch pair"], sin: Float[Tensor, "*#batch pair"]
) -> Float[Tensor, "*batch dim"]:
    """Undo `turn`."""
    square = cos.square() + sin.square()  # of the magnitude
    return turn(states, cos / square, -sin / square)


def read_frequencies(decoder: Any, num_tokens: int) -> Rotary:
    """Read the rotary embedding of a network's decoder, as it is in a pass over `num_tokens` tokens.

    Embeddings whose frequencies depend on the length of the sequence (dynamic, LongRoPE) are read for that length. The
    module is copied before it is called, so nothing changes in it.

    Raises:
        InputError: If it is not where transformers' decoders keep theirs.
    """
    if not hasattr(decoder, "rotary_emb"):
        raise InputError(
            f"architecture {decoder.config.model_type!r} has no rotary embedding of its decoder, which is needed to "
            "turn queries back from their positions: use another method, or another model"
        )
    module, device = copy.deepcopy(decoder.rotary_emb), next(decoder.parameters()).device
    states = torch.zeros(1, device=device)
    last = torch.tensor([[num_tokens - 1]], device=device)
    if "layer_type" in inspect.signature(type(module).forward).parameters:
        kinds = list(dict.fromkeys(decoder.config.layer_types))
        for kind in kinds:
            module(states, last, kind)
        by_kind = {
            kind: (getattr(module, f"{kind}_inv_freq"), getattr(module, f"{kind}_attention_scaling")) for kind in kinds
        }
        rows = [by_kind[kind] for kind in decoder.config.layer_types]
    else:
        module(states, last)  # where frequencies depend on the length, this sets them
        rows = [(module.inv_freq, module.attention_scaling)]
    return Rotary(
        frequencies=torch.stack([frequencies.float() for frequencies, _ in rows]),
        magnitudes=torch.tensor([float(magnitude) for _, magnitude in rows], device=device),
    )
