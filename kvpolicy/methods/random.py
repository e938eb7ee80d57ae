"""The floor that every method must beat: a random order."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.methods.base import CacheState, Method


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Independent uniform scores for every layer, head and token of a sample.

    One draw for the whole cache, on the CPU, so that heads differ from each other and a seed means the same on every
    device.
    """

    name: ClassVar[str] = "random"
    description: ClassVar[str] = "A random order, another one for every sample, layer and head"
    reference: ClassVar[str] = "none"

    def score(self, state: CacheState) -> Float[Tensor, "head token"]:
        """Draw from the sample's seed."""
        # torch's CPU generator reads the lower 32 bits of a seed only, so all 64 are mixed into them first.
        mixed = np.random.SeedSequence(state.seed % 2**64).generate_state(1)
        generator = torch.Generator(device="cpu").manual_seed(int(mixed[0]))
        return torch.rand(state.num_heads, state.num_tokens, generator=generator).to(state.keys.device)
