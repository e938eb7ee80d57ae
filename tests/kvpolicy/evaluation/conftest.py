"""Contenders of every kind for a model; what they would be trained to is drawn at random."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpolicy.evaluation import Contender
from kvpolicy.methods.registry import make_method, method_type
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.policy_set import PolicySet

NUM_SOFT_TOKENS = 4


@pytest.fixture
def make_contenders() -> Callable[[Any, Iterable[str]], list[Contender]]:
    """Contenders by the names of their methods."""

    def make(model: Any, names: Iterable[str]) -> list[Contender]:
        generator = torch.Generator().manual_seed(0)
        agents = BatchedAgents(
            AgentConfig(width=8, position_dim=8),
            num_heads=model.spec.num_heads,
            head_dim=model.spec.head_dim,
            generator=generator,
        )
        table = model.network.get_input_embeddings().weight
        drawn = torch.randn(NUM_SOFT_TOKENS, table.shape[1], generator=generator) * table.float().std()
        made = {
            "": {},
            "policy_set": {"policy": PolicySet(agents=agents, spec=model.spec, model_digest="", training={})},
            "soft_tokens": {"soft_tokens": SimpleNamespace(embeddings=drawn.to(table.dtype))},
        }
        return [Contender(method=make_method(name, **made[method_type(name).trained]), seed=0) for name in names]

    return make
