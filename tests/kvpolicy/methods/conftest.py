"""Tiny caches, and what stands for a trained policy set and for trained soft tokens."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.probe import ProbeStates
from kvpolicy.methods.base import CacheState, Method
from kvpolicy.methods.registry import make_method, method_type
from kvpolicy.models.rotary import Rotary

NUM_PROBES = 5


def _make_state(
    num_tokens: int = 24,
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    group: int = 3,
    dim: int = 4,
    num_queries: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> CacheState:
    generator = torch.Generator().manual_seed(seed + 1000)
    heads = num_layers * num_kv_heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    queries = draw(heads, group, num_tokens, dim) * 2
    return CacheState(
        keys=draw(heads, num_tokens, dim),
        values=draw(heads, num_tokens, dim),
        queries=queries if num_queries is None else queries[:, :, num_tokens - num_queries :],
        positions=torch.arange(num_tokens)[None],
        num_kv_heads=num_kv_heads,
        scaling=LogitScale(factor=dim**-0.5),
        seed=seed,
        importance=torch.rand(heads, num_tokens, generator=generator),
        rotary=Rotary(frequencies=10.0 ** -torch.arange(dim // 2)[None], magnitudes=torch.ones(1)),
        probe=ProbeStates(queries=draw(heads, group, NUM_PROBES, dim) * 2, keys=draw(heads, NUM_PROBES, dim)),
    )


class _SumAgent:
    def score(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return keys.sum(-1) + values.sum(-1) * 2 + positions / 100


_ARTIFACTS = {
    "": {},
    "policy_set": {"policy": _SumAgent()},
    "soft_tokens": {"soft_tokens": SimpleNamespace(embeddings=torch.zeros(NUM_PROBES, 4))},
}


def _make_any(name: str) -> Method:
    return make_method(name, **_ARTIFACTS[method_type(name).trained])


@pytest.fixture
def make_state() -> Callable[..., CacheState]:
    return _make_state


@pytest.fixture
def make_any() -> Callable[[str], Method]:
    return _make_any
