"""The agents: one small network per KV head, all of them as one batched network (KV Policy, arXiv 2602.10238).

Keys and values each go through Linear(d -> width) + LayerNorm, positions through features + LayerNorm; concatenated,
two Linear(width) + LayerNorm + SiLU layers and one linear score follow. Every weight has a leading head dimension and
every product is one batched matrix product: no loop over heads.

Departures from the paper: positions may enter as continuous features (log-position and sinusoids), the default, because
a learned table of 6,000 rows cannot reach past its end; and every channel of keys and values is first standardised by
the mean and deviation of the first training batch, because a few channels of post-RoPE keys are so much larger than the
rest that LayerNorm alone hides what tells tokens apart (docs/log.md has the figures).

Legend: H heads, N tokens (of all sequences of a batch), d head dimension.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvpolicy.errors import InputError

PAPER_TABLE_ROWS = 6000
_MAX_WAVELENGTH_TOKENS = 131072.0
_SMALLEST_DEVIATION = 1e-3


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Shape of one agent.

    Attributes:
        width: Hidden width of every layer.
        position: `continuous` features, or the paper's learned `table`.
        position_dim: Dimension of the position features.
    """

    width: int = 256
    position: Literal["continuous", "table"] = "continuous"
    position_dim: int = 32

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: Naming the field, what was got and what was expected.
        """
        if self.width < 1:
            raise InputError(f"agent: width is {self.width}, expected at least 1")
        if self.position not in ("continuous", "table"):
            raise InputError(f"agent: position is {self.position!r}, expected 'continuous' or 'table'")
        if self.position_dim < 4 or self.position_dim % 2:
            raise InputError(f"agent: position_dim is {self.position_dim}, expected an even number of at least 4")


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
    ) -> Float[Tensor, "head token"]:
        """Score every cached token of every head; higher is kept longer.

        Args:
            keys: Post-RoPE keys.
            values: Values of the same entries.
            positions: Original positions: one row for all heads, or one for each.

        Raises:
            InputError: If a position is past the end of a learned table.
        """
        dtype = keys.dtype
        keys = ((keys.float() - self.key_mean) * self.key_scale).to(dtype)
        values = ((values.float() - self.value_mean) * self.value_scale).to(dtype)
        key = _normalise(_affine(keys, self.key_weight, self.key_bias))
        value = _normalise(_affine(values, self.value_weight, self.value_bias))
        position = _normalise(self._position_features(positions).to(dtype))
        hidden = torch.cat([key, value, position.expand(self.num_heads, -1, -1)], dim=-1)
        # Gain and shift of the three LayerNorms are folded into the layer that follows: weights are small, tokens many.
        gain = torch.cat([self.key_gain, self.value_gain, self.position_gain], dim=-1)
        shift = torch.cat([self.key_shift, self.value_shift, self.position_shift], dim=-1)
        weight, bias = gain.mT * self.hidden1_weight, self.hidden1_bias + shift @ self.hidden1_weight
        hidden = _affine(hidden, weight, bias)
        hidden = nn.functional.silu(_layer_norm(hidden, self.hidden1_gain, self.hidden1_shift))
        hidden = _affine(hidden, self.hidden2_weight, self.hidden2_bias)
        hidden = nn.functional.silu(_layer_norm(hidden, self.hidden2_gain, self.hidden2_shift))
        # In half precision a thousand tokens share a few hundred scores, and ties rank by position.
        return (hidden.float() @ self.score_weight).squeeze(-1)

    @torch.no_grad()
    def fit_inputs(self, keys: Float[Tensor, "head token dim"], values: Float[Tensor, "head token dim"]) -> None:
        """Set by what keys and values are standardised: mean and deviation of these, channel by channel."""
        for name, entries in (("key", keys.float()), ("value", values.float())):
            self.get_buffer(f"{name}_mean").copy_(entries.mean(dim=1, keepdim=True))
            deviation = entries.std(dim=1, keepdim=True, correction=0)
            self.get_buffer(f"{name}_scale").copy_(1 / deviation.clamp_min(_SMALLEST_DEVIATION))

    def _position_features(self, positions: Tensor) -> Tensor:
        if self.config.position == "table":
            last = int(positions.max())
            if last >= PAPER_TABLE_ROWS:
                raise InputError(
                    f"position {last} is past the learned table of {PAPER_TABLE_ROWS} rows: "
                    "use an agent with continuous positions for longer contexts"
                )
            if positions.shape[0] == 1:
                return self.position_table[:, positions[0]]
            return self.position_table[torch.arange(self.num_heads, device=positions.device)[:, None], positions]
        return continuous_position_features(positions, self.config.position_dim)


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


def _affine(inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias.to(inputs.dtype), inputs, weight.to(inputs.dtype))


def _normalise(inputs: Tensor) -> Tensor:
    return nn.functional.layer_norm(inputs, inputs.shape[-1:])


def _layer_norm(inputs: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(shift.to(inputs.dtype), _normalise(inputs), gain.to(inputs.dtype))
