"""Training all agents of a group of heads at once on recorded importance, by policy gradient (arXiv 2602.10238).

Supervised surrogates may take the policy gradient's place, for comparison (kvpolicy.objectives.registry). Not for
reading traces: batches come from the caller, so that the same loop serves any store. Heads are independent: losses add
up, gradients are clipped head by head and AdamW is element-wise. Only the draws of first weights and of noise are
shared by a group, so another grouping gives other agents of the same quality.

Legend: H heads, B sequences, T tokens of the longest sequence.
"""

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpolicy.config.settings import Count, Expect, MoreThanZero, NotNegative, Positive, Settings, at_least
from kvpolicy.errors import InputError
from kvpolicy.objectives.cost import mask_scores, normalised_cost
from kvpolicy.objectives.registry import MIN_RANKINGS, OBJECTIVES, Objective, make_objective
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.seeds import spawn_seeds


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """How agents are trained. The defaults are not the paper's: those are the `paper` preset."""

    agent: AgentConfig = field(default_factory=AgentConfig)
    """Agents to train: `default`, `small` or `paper`."""
    objective: Annotated[str, OBJECTIVES.__getitem__] = "exact"
    """Training objective: `exact`, the policy gradient in closed form, `rloo`, the paper's sampled one, or a supervised
    surrogate such as `listwise`.
    """
    num_rankings: Annotated[int, at_least(MIN_RANKINGS)] = 8
    """Rankings drawn for each sequence by `rloo`."""
    num_steps: Positive = 100
    """Optimiser steps."""
    batch_sequences: Positive = 2
    """Sequences in a step."""
    learning_rate: MoreThanZero = 1e-3
    """Learning rate after the warm-up."""
    final_learning_rate: NotNegative = 1e-5
    """Learning rate at the last step, reached by cosine."""
    num_warmup_steps: Count = 10
    """Steps of linear warm-up, from a hundredth of the learning rate."""
    weight_decay: NotNegative = 1e-3
    """Weight decay of AdamW."""
    max_gradient_norm: MoreThanZero = 5.0
    """Norm to which the gradient of each head is clipped."""
    ema_decay: Annotated[float, Expect(lambda decay: 0 <= decay < 1, "at least 0 and less than 1")] = 0.9
    """Decay of the averaged weights that are kept; 0 keeps the last ones."""
    ema_warmup: bool = True
    """Let that decay rise with the steps, so that the average does not remember the first weights."""
    heldout_every_steps: Positive = 50
    """Steps between measurements on held-out traces, besides the one at the end."""
    heads_per_group: Positive | None = None
    """Heads that one task trains at once; None trains all of them together."""

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 1: linear warm-up, then cosine."""
        if step <= self.num_warmup_steps:
            return self.learning_rate * (0.01 + 0.99 * step / self.num_warmup_steps)
        progress = (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        span = self.learning_rate - self.final_learning_rate
        return self.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))

    def ema_decay_at(self, step: int) -> float:
        """Decay of the averaged weights at a step, counted from 1."""
        return min(self.ema_decay, step / (step + 10)) if self.ema_warmup else self.ema_decay


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

    def of_heads(self, heads: slice) -> "TraceBatch":
        """The same sequences for some heads alone, as views."""
        return replace(self, keys=self.keys[heads], values=self.values[heads], importance=self.importance[heads])


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Measurements of one step.

    Attributes:
        step: Counted from 1.
        loss: Mean over heads and sequences; for `exact` the log of the expected normalised cost.
        train_s: Seconds of all steps so far, with the wait for their batches and without held-out measurements.
        gradient_norm: Mean over heads, before clipping.
        learning_rate: Learning rate of the step.
        heads_at_once: Heads whose activations were in memory together: all, until the device had no room for them.
        heldout_cost: Normalised eviction cost of each head on held-out traces, where this step measured it.
    """

    step: int
    loss: float
    train_s: float
    gradient_norm: float
    learning_rate: float
    heads_at_once: int
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

    A step for which the device has no memory is taken again with half of the heads at a time. As heads are
    independent that changes nothing but rounding, and the draws of `rloo` and `pairwise`.

    Args:
        batches: At least `config.num_steps` batches.
        config: How to train.
        num_heads: Heads of every batch.
        head_dim: Dimension of keys and values.
        heldout: Gives the held-out batches anew at each call.
        seed: Seed of the first weights, and of the draws of `rloo` and `pairwise`.
        device: Where to train.
        on_step: Called after every step.

    Returns:
        The agents (averaged weights) and the normalised eviction cost of each head on the held-out traces.

    Raises:
        InputError: If the batches end early, scores or a loss are not finite, or one head alone is too much for the
            device's memory.
    """
    weight_seed, noise_seed = spawn_seeds(seed, 2)
    generator = torch.Generator().manual_seed(weight_seed)
    agents = BatchedAgents(config.agent, num_heads=num_heads, head_dim=head_dim, generator=generator).to(device)
    noise = torch.Generator(device=device).manual_seed(noise_seed)
    objective = make_objective(config.objective, num_rankings=config.num_rankings, generator=noise)
    source = iter(batches)
    if config.agent.standardise:
        source = _fit_inputs(agents, source)
    averaged = copy.deepcopy(agents).requires_grad_(False)
    optimizer = torch.optim.AdamW(agents.parameters(), weight_decay=config.weight_decay, fused=True)
    cost, train_s, at_once = torch.full((num_heads,), torch.nan), 0.0, num_heads
    for step in range(1, config.num_steps + 1):
        started = time.perf_counter()
        batch = next(source, None)
        if batch is None:
            raise InputError(f"train: the batches ended after {step - 1} of {config.num_steps} steps")
        loss, at_once = _backward(agents, objective, batch, at_once=at_once, noise=noise, step=step)
        gradient_norm = _step(agents, optimizer, config=config, step=step)
        _average(averaged, agents, config.ema_decay_at(step))
        train_s += time.perf_counter() - started
        measured = step % config.heldout_every_steps == 0 or step == config.num_steps
        if measured:
            cost = heldout_cost(averaged, heldout())
        on_step(
            StepRecord(
                step=step,
                loss=loss,
                train_s=train_s,
                gradient_norm=gradient_norm,
                learning_rate=config.learning_rate_at(step),
                heads_at_once=at_once,
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


def _scores(
    agents: BatchedAgents, batch: TraceBatch, heads: slice = slice(None)
) -> Float[Tensor, "head sequence token"]:
    flat = agents(batch.keys.flatten(1, 2), batch.values.flatten(1, 2), batch.positions.flatten()[None], heads=heads)
    scores: Tensor = flat.unflatten(1, batch.mask.shape)
    return scores


def _fit_inputs(agents: BatchedAgents, source: Iterator[TraceBatch]) -> Iterator[TraceBatch]:
    """Standardise inputs by the first batch; returns all batches again."""
    first = next(source, None)
    if first is None:
        return source
    agents.fit_inputs(first.keys[:, first.mask], first.values[:, first.mask])
    return chain([first], source)


def _backward(
    agents: BatchedAgents, objective: Objective, batch: TraceBatch, *, at_once: int, noise: torch.Generator, step: int
) -> tuple[float, int]:
    """Add up the gradients of all heads; returns the loss, mean over heads, and how many fitted in memory at once."""
    before = noise.get_state()
    while True:
        try:
            blocks = (slice(first, first + at_once) for first in range(0, agents.num_heads, at_once))
            losses = [_backward_block(agents, objective, batch, heads, step) for heads in blocks]
            return float(torch.cat(losses).mean()), at_once
        except torch.OutOfMemoryError as error:
            if at_once == 1:
                raise InputError(
                    f"train: a step of one head does not fit in the device's memory ({batch.mask.numel()} tokens): "
                    "lower batch_sequences, or shorten the prompts"
                ) from error
        agents.zero_grad()
        noise.set_state(before)
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        at_once = (at_once + 1) // 2


def _backward_block(
    agents: BatchedAgents, objective: Objective, batch: TraceBatch, heads: slice, step: int
) -> Float[Tensor, "some"]:
    """Add up the gradients of some heads; returns the loss of each."""
    part = batch.of_heads(heads)
    scores = _scores(agents, part, heads)
    if not bool(scores.isfinite().all()):
        raise InputError(f"train: scores are not finite at step {step}; lower the learning rate, or check the traces")
    loss = objective(scores, part.importance, batch.mask.expand(scores.shape)).mean(dim=1)  # over a head's sequences
    if not bool(loss.isfinite().all()):
        raise InputError(f"train: the loss is {float(loss.mean())} at step {step}; lower the learning rate")
    loss.sum().backward()  # type: ignore[no-untyped-call]  # torch declares no types here
    return loss.detach()


def _step(agents: BatchedAgents, optimizer: torch.optim.Optimizer, *, config: TrainConfig, step: int) -> float:
    """Use the gradients for one step of the optimiser; returns their norm, the mean over heads."""
    for parameters in optimizer.param_groups:
        parameters["lr"] = config.learning_rate_at(step)
    norms = clip_by_head(agents, config.max_gradient_norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(norms.mean())


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
    torch._foreach_lerp_(list(averaged.parameters()), list(agents.parameters()), 1 - decay)
