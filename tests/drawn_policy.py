"""Policies that nobody has trained: what is kept is drawn once, and the same in every run."""

import torch

from kvpolicy.models.language_model import LanguageModel
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.policy_set import PolicySet

SMALL = AgentConfig(width=8, position_dim=8)


def draw_policy(model: LanguageModel, config: AgentConfig = SMALL, *, constant: bool = False) -> PolicySet:
    """Random agents for a model, or `constant` ones that score all tokens alike, so that heads keep the earliest."""
    spec = model.spec
    agents = BatchedAgents(
        config, num_heads=spec.num_heads, head_dim=spec.head_dim, generator=torch.Generator().manual_seed(0)
    ).requires_grad_(False)
    if constant:
        agents.score_weight.zero_()
    return PolicySet(agents=agents, spec=spec, model_digest=model.digest, training={})
