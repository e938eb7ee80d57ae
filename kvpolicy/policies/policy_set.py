"""A policy set: the agents of every KV head of one model, as they are saved, shipped and used.

On disk it is a folder of `policy.safetensors` (all weights) and `policy.json` (shape, configuration and the model that
it was trained for). Its digest covers both, so equal training gives an equal id.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.specs import ModelSpec

FORMAT_VERSION = 1
WEIGHTS = "policy.safetensors"
RECORD = "policy.json"


@dataclass(frozen=True, kw_only=True)
class PolicySet:
    """Agents for every KV head of a model.

    Attributes:
        agents: All heads in one network, layer-major.
        spec: Shape of the model.
        model_digest: Of the model that they were trained for; see `require_model`.
        training: What they were trained with, for people: objective, seed, trace snapshot.
    """

    agents: BatchedAgents
    spec: ModelSpec
    model_digest: str
    training: dict[str, Any]

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

    def require_model(self, digest: str) -> None:
        """Refuse a model that the policies were not trained for.

        Raises:
            InputError: If the digests differ.
        """
        if digest != self.model_digest:
            raise InputError(
                f"policy set was trained for model {self.model_digest[:16]}, not for {digest[:16]}: "
                "use that model, or train policies for this one"
            )

    def save(self, folder: Path) -> str:
        """Write the set into `folder` and return its digest.

        Returns:
            SHA-256 over weights and record.
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.agents.state_dict().items()}
        save_file(weights, folder / WEIGHTS)
        record = {
            "format_version": FORMAT_VERSION,
            "agent": asdict(self.agents.config),
            "model": asdict(self.spec),
            "model_digest": self.model_digest,
            "training": self.training,
            "weights_sha256": digest_file(folder / WEIGHTS),
        }
        (folder / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True))
        return policy_digest(folder)


def policy_digest(folder: Path) -> str:
    """SHA-256 over the weights and the record of a saved policy set."""
    contents = hashlib.sha256()
    for name in (WEIGHTS, RECORD):
        contents.update((folder / name).read_bytes())
    return contents.hexdigest()


def load_policy(folder: Path, *, device: str = "cpu") -> PolicySet:
    """Load a saved policy set.

    Raises:
        InputError: If the folder holds none, or one of another format or shape.
    """
    from safetensors.torch import load_file

    try:
        record = json.loads((folder / RECORD).read_text())
        if record["format_version"] != FORMAT_VERSION:
            raise InputError(
                f"policy set {folder} has format {record['format_version']}, this version reads {FORMAT_VERSION}: "
                "use the kvpolicy version that made it"
            )
        spec = ModelSpec(**record["model"])
        agents = BatchedAgents(
            AgentConfig(**record["agent"]),
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            generator=torch.Generator(),
        )
        if digest_file(folder / WEIGHTS) != record["weights_sha256"]:
            raise InputError(f"policy set {folder}: {WEIGHTS} is not what {RECORD} says: delete it and train again")
        agents.load_state_dict(load_file(folder / WEIGHTS))
        agents.requires_grad_(False).eval().to(device)
        return PolicySet(agents=agents, spec=spec, model_digest=record["model_digest"], training=record["training"])
    except InputError:
        raise
    except Exception as error:  # a missing, cut or foreign file fails in many ways that mean the same
        raise InputError(
            f"policy set {folder} cannot be read ({type(error).__name__}): it must be a folder of {RECORD} and "
            f"{WEIGHTS} that `kvp train` wrote; delete it and train again"
        ) from error


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
