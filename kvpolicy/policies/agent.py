"""The agents: one small network per KV head, all of them as one batched network (KV Policy, arXiv 2602.10238).

Keys and values each go through Linear(d -> width) + LayerNorm, positions through features + LayerNorm; concatenated,
two Linear(width) + LayerNorm + SiLU layers and one linear score follow. Every weight has a leading head dimension and
every product is one batched matrix product over a block of heads: never a loop over single heads.

Departures from the paper, all of them off in the agent named `paper`: positions may enter as continuous features
(log-position and sinusoids), because a learned table of 6,000 rows cannot reach past its end; every channel of keys and
values is first standardised by the mean and deviation of the first training batch, because a few channels of post-RoPE
keys are so much larger than the rest that LayerNorm alone hides what tells tokens apart; and agents are narrower,
which costs no quality that was measured (docs/log.md has the figures).

Legend: H heads, N tokens (of all sequences of a batch), d head dimension.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvpolicy.config.settings import Expect, Positive, Settings
from kvpolicy.errors import InputError

PAPER_TABLE_ROWS = 6000
_MAX_WAVELENGTH_TOKENS = 131072.0
_SMALLEST_DEVIATION = 1e-3
# Heads go through the network in blocks whose activations stay in a processor's caches between operations, which is
# several times faster than all heads at once. An accelerator takes as many as it likes.
_BLOCK_BYTES = 4 * 2**20
_ACCELERATOR_BLOCK_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Settings):
    """Shape of one agent."""

    width: Positive = 64
    """Hidden width of every layer."""
    position: Literal["continuous", "table"] = "continuous"
    """`continuous` features, or the paper's learned `table`."""
    position_dim: Annotated[
        int, Expect(lambda count: count >= 4 and count % 2 == 0, "an even number of at least 4")
    ] = 32
    """Dimension of the position features."""
    standardise: bool = True
    """Standardise channels of keys and values by the first training batch."""

    def check_position(self, position: int) -> None:
        """Check that the agent knows a position.

        Raises:
            InputError: If it is past the end of a learned table.
        """
        if self.position == "table" and position >= PAPER_TABLE_ROWS:
            raise InputError(
                f"position {position} is past the learned table of {PAPER_TABLE_ROWS} rows: "
                "use an agent with continuous positions for longer contexts"
            )

    @staticmethod
    def named(name: str) -> "AgentConfig":
        """One of the agents that have a name: `default`, `small` or `paper`.

        Raises:
            InputError: If there is none of that name.
        """
        if name not in AgentConfig.by_name:
            raise InputError(f"agent {name!r} is unknown, expected one of {', '.join(AgentConfig.by_name)}")
        agent: AgentConfig = AgentConfig.by_name[name]
        return agent


AgentConfig.by_name = {
    "default": AgentConfig(),
    "small": AgentConfig(width=16),
    "paper": AgentConfig(width=256, position="table", position_dim=32, standardise=False),
}


class BatchedAgents(nn.Module):
    """Agents of `num_heads` KV heads as one network.

    Weights are float32; products and normalisation run in the dtype of the keys, the score in float32.
    """

    key_mean: Tensor
    key_scale: Tensor
    value_mean: Tensor
    value_scale: Tensor

    def __init__(self, config: AgentConfig, *, num_heads: int, head_dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.config, self.num_heads, self.head_dim = config, num_heads, head_dim
        width = config.width
        for name in ("key", "value"):
            self.register_buffer(f"{name}_mean", torch.zeros(num_heads, 1, head_dim))
            self.register_buffer(f"{name}_scale", torch.ones(num_heads, 1, head_dim))

        def weight(fan_in: int, fan_out: int) -> nn.Parameter:
            bound = 1 / math.sqrt(fan_in)
            return nn.Parameter(torch.empty(num_heads, fan_in, fan_out).uniform_(-bound, bound, generator=generator))

        def filled(size: int, value: float) -> nn.Parameter:
            return nn.Parameter(torch.full((num_heads, 1, size), value))

        self.key_weight, self.key_bias = weight(head_dim, width), filled(width, 0.0)
        self.value_weight, self.value_bias = weight(head_dim, width), filled(width, 0.0)
        self.key_gain, self.key_shift = filled(width, 1.0), filled(width, 0.0)
        self.value_gain, self.value_shift = filled(width, 1.0), filled(width, 0.0)
        self.position_gain, self.position_shift = filled(config.position_dim, 1.0), filled(config.position_dim, 0.0)
        if config.position == "table":
            table = torch.randn(num_heads, PAPER_TABLE_ROWS, config.position_dim, generator=generator)
            self.position_table = nn.Parameter(table)
        joined = 2 * width + config.position_dim
        self.hidden1_weight, self.hidden1_bias = weight(joined, width), filled(width, 0.0)
        self.hidden1_gain, self.hidden1_shift = filled(width, 1.0), filled(width, 0.0)
        self.hidden2_weight, self.hidden2_bias = weight(width, width), filled(width, 0.0)
        self.hidden2_gain, self.hidden2_shift = filled(width, 1.0), filled(width, 0.0)
        self.score_weight = weight(width, 1)

    def forward(
        self,
        keys: Float[Tensor, "head token dim"],
        values: Float[Tensor, "head token dim"],
        positions: Int[Tensor, "shared token"],
        *,
        heads: slice = slice(None),
    ) -> Float[Tensor, "head token"]:
        """Score every cached token of every head; higher is kept longer.

        Args:
            keys: Post-RoPE keys.
            values: Values of the same entries.
            positions: Original positions: one row for all heads, or one for each.
            heads: The heads that these are of; all by default.

        Raises:
            InputError: If a position is past the end of a learned table.
        """
        if self.config.position == "table":
            self.config.check_position(int(positions.max()))
        shared = positions.shape[0] == 1
        features = None
        if self.config.position == "continuous":  # those of a table differ by head, and are looked up block by block
            features = _normalise(continuous_position_features(positions, self.config.position_dim).to(keys.dtype))
        size = _heads_per_block(keys, self.config.width)
        scores = []
        for first, weights in zip(range(0, keys.shape[0], size), self._blocks(heads, size), strict=True):
            block = slice(first, first + size)
            selected = slice(None) if shared else block
            if features is None:
                position = _normalise(_rows(weights["position_table"], positions[selected]).to(keys.dtype))
            else:
                position = features[selected]
            scores.append(_score(weights, keys[block], values[block], position))
        return torch.cat(scores)

    @torch.no_grad()
    def fit_inputs(self, keys: Float[Tensor, "head token dim"], values: Float[Tensor, "head token dim"]) -> None:
        """Set by what keys and values are standardised: mean and deviation of these, channel by channel."""
        for name, entries in (("key", keys.float()), ("value", values.float())):
            self.get_buffer(f"{name}_mean").copy_(entries.mean(dim=1, keepdim=True))
            deviation = entries.std(dim=1, keepdim=True, correction=0)
            self.get_buffer(f"{name}_scale").copy_(1 / deviation.clamp_min(_SMALLEST_DEVIATION))

    def _blocks(self, heads: slice, size: int) -> Iterator[dict[str, Tensor]]:
        """Weights of consecutive blocks of some heads."""
        weights = dict(self.named_parameters()) | dict(self.named_buffers())
        # One split, and not a slice a block: the gradient of a slice is as large as the whole.
        for parts in zip(*(torch.split(tensor[heads], size) for tensor in weights.values()), strict=True):
            yield dict(zip(weights, parts, strict=True))


def continuous_position_features(
    positions: Int[Tensor, "*batch token"], num_features: int
) -> Float[Tensor, "*batch token feature"]:
    """Log-position, its square, and sinusoids of log-spaced wavelengths; finite at any position."""
    real = positions.to(torch.float32)
    log = torch.log1p(real)
    num_waves = (num_features - 2) // 2
    waves = torch.logspace(math.log10(16.0), math.log10(_MAX_WAVELENGTH_TOKENS), num_waves, device=positions.device)
    angles = real[..., None] * (2 * math.pi / waves)
    return torch.cat([log[..., None] / 4 - 1, (log[..., None] / 8) ** 2, angles.sin(), angles.cos()], dim=-1)


def _heads_per_block(keys: Tensor, width: int) -> int:
    bytes_per_head = keys.shape[1] * width * keys.element_size()
    block_bytes = _BLOCK_BYTES if keys.device.type == "cpu" else _ACCELERATOR_BLOCK_BYTES
    return max(1, block_bytes // max(1, bytes_per_head))


def _rows(table: Tensor, positions: Tensor) -> Tensor:
    """Rows of each head's table, at positions that heads share or not."""
    if positions.shape[0] == 1:
        return table[:, positions[0]]
    return table[torch.arange(table.shape[0], device=table.device)[:, None], positions]


def _score(
    weights: Mapping[str, Tensor],
    keys: Float[Tensor, "block token dim"],
    values: Float[Tensor, "block token dim"],
    position: Float[Tensor, "shared token feature"],
) -> Float[Tensor, "block token"]:
    """The network of a block of heads, on normalised position features."""
    key = _normalise(_standardised_affine(keys, weights, "key"))
    value = _normalise(_standardised_affine(values, weights, "value"))
    hidden = torch.cat([key, value, position.expand(keys.shape[0], -1, -1)], dim=-1)
    # Gain and shift of the three LayerNorms are folded into the layer that follows: weights are small, tokens many.
    gain = torch.cat([weights[f"{name}_gain"] for name in ("key", "value", "position")], dim=-1)
    shift = torch.cat([weights[f"{name}_shift"] for name in ("key", "value", "position")], dim=-1)
    weight = gain.mT * weights["hidden1_weight"]
    hidden = _affine(hidden, weight, weights["hidden1_bias"] + shift @ weights["hidden1_weight"])
    hidden = _activate(hidden, weights, "hidden1")
    hidden = _affine(hidden, weights["hidden2_weight"], weights["hidden2_bias"])
    hidden = _activate(hidden, weights, "hidden2")
    # In half precision a thousand tokens share a few hundred scores, and ties rank by position.
    return (hidden.float() @ weights["score_weight"]).squeeze(-1)


def _standardised_affine(inputs: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Linear layer on standardised inputs, with mean and deviation folded into it, so that no copy of them is made."""
    weight = (weights[f"{name}_scale"].mT * weights[f"{name}_weight"]).to(inputs.dtype)
    # The mean goes through the weight as it was rounded: what is left of a large mean is the same for every token.
    return _affine(
        inputs, weight, weights[f"{name}_bias"] - weights[f"{name}_mean"] @ weight.to(weights[f"{name}_mean"].dtype)
    )


def _affine(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias.to(inputs.dtype), inputs, weight.to(inputs.dtype))


def _normalise(inputs: Tensor) -> Tensor:
    return nn.functional.layer_norm(inputs, inputs.shape[-1:])


def _activate(inputs: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    gain, shift = weights[f"{name}_gain"].to(inputs.dtype), weights[f"{name}_shift"].to(inputs.dtype)
    return nn.functional.silu(torch.addcmul(shift, _normalise(inputs), gain), inplace=not torch.is_grad_enabled())
