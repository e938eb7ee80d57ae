"""A policy set: the agents of every KV head of one model, as they are saved, shipped and used.

On disk it is a folder of `policy.safetensors` (all weights) and `policy.json` (shape, configuration and the model that
it was trained for). Its digest covers both, so equal training gives an equal id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.config.specs import ModelSpec
from kvpolicy.errors import InputError
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.saved import SavedKind, Trained

WEIGHTS = "policy.safetensors"
RECORD = "policy.json"
SAVED = SavedKind(name="policy set", weights=WEIGHTS, record=RECORD, version=1)


@dataclass(frozen=True, kw_only=True)
class PolicySet(Trained):
    """Agents for every KV head of a model.

    Attributes:
        agents: All heads in one network, layer-major.
    """

    saved: ClassVar[SavedKind] = SAVED

    agents: BatchedAgents

    @torch.inference_mode()
    def score(
        self,
        keys: Float[Tensor, "head token dim"],
        values: Float[Tensor, "head token dim"],
        positions: Int[Tensor, "shared token"],
    ) -> Float[Tensor, "head token"]:
        """Score cached tokens, whose positions are the same for all heads or one row a head; higher is kept longer."""
        scores: Tensor = self.agents(keys, values, positions)
        return scores

    def tensors(self) -> Mapping[str, Tensor]:
        """Weights of all agents."""
        return self.agents.state_dict()

    def settings(self) -> dict[str, Any]:
        """Configuration of the agents."""
        return {"agent": asdict(self.agents.config)}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], record: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
        """The agents, where their weights are."""
        config, heads = AgentConfig(**record["agent"]), {"num_heads": spec.num_heads, "head_dim": spec.head_dim}
        agents = BatchedAgents(config, **heads, generator=torch.Generator())
        agents.load_state_dict(tensors)
        device = next(iter(tensors.values())).device
        return {"agents": agents.requires_grad_(False).eval().to(device)}


def load_policy(folder: str | Path, *, device: str = "cpu") -> PolicySet:
    """Load a saved policy set.

    One that is in MLflow's registry, or a home's champion, is found by `tasks.inputs.policies.find_policy`.

    Raises:
        InputError: If the folder holds none, or one of another format or shape.
    """
    return PolicySet.load(Path(folder), device=device)


def join_agents(groups: Sequence[BatchedAgents]) -> BatchedAgents:
    """One network of the agents of consecutive groups of heads.

    Raises:
        InputError: If there are none, or their configurations differ.
    """
    if not groups or any((g.config, g.head_dim) != (groups[0].config, groups[0].head_dim) for g in groups):
        raise InputError("policies: groups of heads must be of one configuration to be joined")
    joined = BatchedAgents(
        groups[0].config,
        num_heads=sum(group.num_heads for group in groups),
        head_dim=groups[0].head_dim,
        generator=torch.Generator(),
    )
    states = [group.state_dict() for group in groups]
    joined.load_state_dict({name: torch.cat([state[name] for state in states]) for name in states[0]})
    return joined.requires_grad_(False).eval()
