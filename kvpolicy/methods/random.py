"""The floor that every method must beat: a random order."""

from dataclasses import dataclass

import numpy as np
import torch

from kvpolicy.methods.base import CacheState, Method, Scores


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Independent uniform scores for every layer, head and token of a sample.

    One draw for the whole cache, on the CPU, so that heads differ from each other and a seed means the same on every
    device.
    """

    name = "random"
    description = "A random order, another one for every sample, layer and head"
    reference = "none"

    def score(self, state: CacheState) -> Scores:
        """Draw from the sample's seed."""
        # torch's CPU generator reads the lower 32 bits of a seed only, so all 64 are mixed into them first.
        mixed = np.random.SeedSequence(state.seed % 2**64).generate_state(1)
        generator = torch.Generator(device="cpu").manual_seed(int(mixed[0]))
        return torch.rand(state.num_heads, state.num_tokens, generator=generator).to(state.keys.device)
