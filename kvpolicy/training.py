"""Training all agents of a group of heads at once, by policy gradient on recorded importance (arXiv 2602.10238).

Not for reading traces: batches come from the caller, so that the same loop serves any store. Heads are independent:
losses add up, gradients are clipped head by head and AdamW is element-wise. Only the draws of first weights and of
noise are shared by a group, so another grouping gives other agents of the same quality.

Legend: H heads, B sequences, T tokens of the longest sequence.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpolicy.errors import InputError
from kvpolicy.objectives.cost import mask_scores, normalised_cost
from kvpolicy.objectives.exact import exact_loss
from kvpolicy.objectives.rloo import MIN_RANKINGS, rloo_loss
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.seeds import spawn_seeds

ESTIMATORS = ("exact", "rloo")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How agents are trained. The defaults are not the paper's: those are the `paper` preset.

    Attributes:
        agent: Shape of an agent.
        estimator: `exact`, the closed form, or `rloo`, the paper's sampled one.
        num_rankings: Rankings drawn for each sequence by `rloo`.
        num_steps: Optimiser steps.
        batch_sequences: Sequences in a step.
        learning_rate: Reached after the warm-up.
        final_learning_rate: Reached by cosine at the last step.
        num_warmup_steps: Steps of linear warm-up, from a hundredth of the learning rate.
        weight_decay: AdamW's.
        max_gradient_norm: Of each head.
        ema_decay: Of the averaged weights that are kept; 0 keeps the last ones.
        heldout_every_steps: Steps between measurements on held-out traces, besides the one at the end.
        heads_per_group: Heads that one task trains at once; None trains all of them together.
    """

    agent: AgentConfig = field(default_factory=AgentConfig)
    estimator: Literal["exact", "rloo"] = "exact"
    num_rankings: int = 8
    num_steps: int = 100
    batch_sequences: int = 2
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-5
    num_warmup_steps: int = 10
    weight_decay: float = 1e-3
    max_gradient_norm: float = 5.0
    ema_decay: float = 0.9
    heldout_every_steps: int = 50
    heads_per_group: int | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: Naming each wrong field, what was got and what was expected.
        """
        problems = [
            f"{name} is {getattr(self, name)}, expected at least {least}"
            for name, least in {
                "num_steps": 1,
                "batch_sequences": 1,
                "num_rankings": MIN_RANKINGS,
                "num_warmup_steps": 0,
                "heldout_every_steps": 1,
                "weight_decay": 0.0,
                "final_learning_rate": 0.0,
            }.items()
            if getattr(self, name) < least
        ]
        problems += [
            f"{name} is {getattr(self, name)}, expected more than 0"
            for name in ("learning_rate", "max_gradient_norm")
            if getattr(self, name) <= 0
        ]
        if self.heads_per_group is not None and self.heads_per_group < 1:
            problems.append(f"heads_per_group is {self.heads_per_group}, expected at least 1")
        if self.estimator not in ESTIMATORS:
            problems.append(f"estimator is {self.estimator!r}, expected one of {', '.join(ESTIMATORS)}")
        if not 0 <= self.ema_decay < 1:
            problems.append(f"ema_decay is {self.ema_decay}, expected at least 0 and less than 1")
        if problems:
            raise InputError("train: " + "; ".join(problems))

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 1: linear warm-up, then cosine."""
        if step <= self.num_warmup_steps:
            return self.learning_rate * (0.01 + 0.99 * step / self.num_warmup_steps)
        progress = (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        span = self.learning_rate - self.final_learning_rate
        return self.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class TraceBatch:
    """Traces of some sequences, padded to the longest.

    Attributes:
        keys: Post-RoPE keys.
        values: Values.
        importance: Importance; 0 for padding.
        positions: Original positions.
        mask: False for padding.
    """

    keys: Float[Tensor, "head sequence token dim"]
    values: Float[Tensor, "head sequence token dim"]
    importance: Float[Tensor, "head sequence token"]
    positions: Int[Tensor, "sequence token"]
    mask: Bool[Tensor, "sequence token"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step says of itself.

    Attributes:
        step: Counted from 1.
        loss: Mean over heads and sequences; for `exact` the log of the expected normalised cost.
        gradient_norm: Mean over heads, before clipping.
        learning_rate: That the step used.
        heldout_cost: Normalised eviction cost of each head on held-out traces, where this step measured it.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    heldout_cost: Float[Tensor, "head"] | None


def train_agents(
    batches: Iterable[TraceBatch],
    config: TrainConfig,
    *,
    num_heads: int,
    head_dim: int,
    heldout: Callable[[], Iterable[TraceBatch]],
    seed: int,
    device: str = "cpu",
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> tuple[BatchedAgents, Float[Tensor, "head"]]:
    """Train one agent per head.

    Args:
        batches: At least `config.num_steps` batches.
        config: How to train.
        num_heads: Heads of every batch.
        head_dim: Dimension of keys and values.
        heldout: Gives the held-out batches anew at each call.
        seed: Of the first weights and of the rankings that `rloo` draws.
        device: Where to train.
        on_step: Told of every step.

    Returns:
        The agents (averaged weights) and the normalised eviction cost of each head on the held-out traces.

    Raises:
        InputError: If the batches end early, or scores or a loss are not finite.
    """
    weight_seed, noise_seed = spawn_seeds(seed, 2)
    generator = torch.Generator().manual_seed(weight_seed)
    agents = BatchedAgents(config.agent, num_heads=num_heads, head_dim=head_dim, generator=generator).to(device)
    source = iter(batches)
    first = next(source, None)
    if first is not None:
        agents.fit_inputs(first.keys[:, first.mask], first.values[:, first.mask])
        source = chain([first], source)
        del first  # a batch may be gigabytes
    averaged = copy.deepcopy(agents).requires_grad_(False)
    optimizer = torch.optim.AdamW(agents.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    noise = torch.Generator(device=device).manual_seed(noise_seed)
    cost = torch.full((num_heads,), torch.nan)
    for step in range(1, config.num_steps + 1):
        batch = next(source, None)
        if batch is None:
            raise InputError(f"train: the batches ended after {step - 1} of {config.num_steps} steps")
        rate = config.learning_rate_at(step)
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        scores = _scores(agents, batch)
        if not bool(scores.isfinite().all()):
            raise InputError(
                f"train: scores are not finite at step {step}; lower the learning rate, or check the traces"
            )
        loss = _loss(scores, batch, config, noise).mean(dim=1)  # of each head, over its sequences
        loss.sum().backward()  # type: ignore[no-untyped-call]  # torch declares no types here
        norms = clip_by_head(agents, config.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        _average(averaged, agents, min(config.ema_decay, step / (step + 10)))
        measured = step % config.heldout_every_steps == 0 or step == config.num_steps
        if measured:
            cost = heldout_cost(averaged, heldout())
        mean_loss = float(loss.detach().mean())
        if not math.isfinite(mean_loss):
            raise InputError(f"train: the loss is {mean_loss} at step {step}; lower the learning rate")
        on_step(
            StepRecord(
                step=step,
                loss=mean_loss,
                gradient_norm=float(norms.mean()),
                learning_rate=rate,
                heldout_cost=cost if measured else None,
            )
        )
    return averaged, cost


@torch.no_grad()
def heldout_cost(agents: BatchedAgents, batches: Iterable[TraceBatch]) -> Float[Tensor, "head"]:
    """Normalised eviction cost of each head's ranking, mean over sequences."""
    totals = torch.zeros(agents.num_heads)
    num_sequences = 0
    for batch in batches:
        scores = _scores(agents, batch)
        scores = mask_scores(scores, batch.mask.expand(scores.shape))
        totals += normalised_cost(scores, batch.importance).sum(dim=1).cpu()
        num_sequences += batch.mask.shape[0]
    if not num_sequences:
        raise InputError("train: there are no held-out traces to measure the cost on")
    return totals / num_sequences


def _scores(agents: BatchedAgents, batch: TraceBatch) -> Float[Tensor, "head sequence token"]:
    flat = agents(batch.keys.flatten(1, 2), batch.values.flatten(1, 2), batch.positions.flatten()[None])
    scores: Tensor = flat.unflatten(1, batch.mask.shape)
    return scores


def _loss(
    scores: Float[Tensor, "head sequence token"], batch: TraceBatch, config: TrainConfig, noise: torch.Generator
) -> Float[Tensor, "head sequence"]:
    mask = batch.mask.expand(scores.shape)
    if config.estimator == "exact":
        return exact_loss(scores, batch.importance, mask)
    return rloo_loss(scores, batch.importance, mask, num_rankings=config.num_rankings, generator=noise)


def clip_by_head(agents: BatchedAgents, max_norm: float) -> Float[Tensor, "head"]:
    """Scale each head's gradient to at most `max_norm`, as training it alone would; returns the norms before."""
    gradients = [parameter.grad for parameter in agents.parameters() if parameter.grad is not None]
    norms: Tensor = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    scale = (max_norm / norms.clamp_min(1e-6)).clamp_max(1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
    return norms


@torch.no_grad()
def _average(averaged: BatchedAgents, agents: BatchedAgents, decay: float) -> None:
    # The decay starts low and rises, so that the average does not remember the first weights.
    torch._foreach_lerp_(list(averaged.parameters()), list(agents.parameters()), 1 - decay)
