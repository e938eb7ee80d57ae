"""What it costs to rank a cache of 4K tokens, and what a smaller agent loses.

Scoring and selection of every KV head are timed against the prefill of the same tokens, in turns, so that a busy moment
hits both. The held-out cost is that of the demo's training on the same traces, for a spread of heads. Printed by
`make bench`; the last line says whether both limits of the design hold.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.methods.ranking import kept_positions
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.policy_set import PolicySet
from kvpolicy.presets.pipeline_config import load_preset
from kvpolicy.training.policy_training import train_agents
from tests.benchmarks.ruler_traces import RulerTraces, collect_ruler_traces

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_TOKENS, BUDGET, ROUNDS = 4096, 512, 5
AGENTS = ("default", "small")
LIMITS = {"default": 0.08, "small": 0.03}
MOST_COST_OF_SMALL = 1.03
HEADS = range(0, 90, 5)
SEED = 0


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _shares_of_prefill(model: Any) -> dict[str, float]:
    """Seconds of scoring and selection over those of the prefill: the median of several turns."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(100, 40_000, (NUM_TOKENS,), generator=generator)
    cache = prefill(model, tokens, num_queries=0)
    positions = torch.arange(NUM_TOKENS)[None]
    policies = {}
    for name in AGENTS:
        agents = BatchedAgents(
            AgentConfig.named(name), num_heads=model.spec.num_heads, head_dim=model.spec.head_dim, generator=generator
        )
        agents.fit_inputs(cache.keys, cache.values)
        policies[name] = PolicySet(agents=agents.requires_grad_(False), spec=model.spec, model_digest="", training={})
    shares: dict[str, list[float]] = {name: [] for name in AGENTS}
    for turn in range(1 + ROUNDS):
        of_prefill = _seconds(lambda: prefill(model, tokens, num_queries=0))
        print(f"\nturn {turn}: prefill {of_prefill:.2f} s", end="")
        for name, policy in policies.items():
            own = _seconds(lambda p=policy: kept_positions(p.score(cache.keys, cache.values, positions), BUDGET))
            print(f", {name} {own * 1e3:.0f} ms", end="")
            if turn:  # the first one warms up
                shares[name].append(own / of_prefill)
    print()
    return {name: statistics.median(own) for name, own in shares.items()}


def _heldout_cost(traces: RulerTraces, agent: AgentConfig) -> float:
    config = dataclasses.replace(load_preset("demo").train, agent=agent, heldout_every_steps=600)
    _, cost = train_agents(
        traces.batches(sequences=config.batch_sequences, seed=SEED),
        config,
        num_heads=traces.num_heads,
        head_dim=traces.head_dim,
        heldout=traces.heldout_batches,
        seed=SEED,
    )
    return float(cost.mean())


def test_ranking_costs_a_small_share_of_the_prefill(embedded_model: Any) -> None:
    shares = _shares_of_prefill(embedded_model)
    demo = load_preset("demo")
    traces = collect_ruler_traces(
        embedded_model,
        num_train=demo.collect.num_train_samples,
        num_heldout=demo.collect.num_heldout_samples,
        length_tokens=demo.prompts.length_tokens,
        heads=HEADS,
        seed=SEED,
    )
    cost = {name: _heldout_cost(traces, AgentConfig.named(name)) for name in AGENTS}
    for name in AGENTS:
        print(
            f"{name} agent (width {AgentConfig.named(name).width}): scoring and selection take {shares[name]:.1%} of "
            f"the prefill of {NUM_TOKENS} tokens (limit {LIMITS[name]:.0%}); held-out cost {cost[name]:.3f} on "
            f"{len(HEADS)} heads"
        )
    of_cost = cost["small"] / cost["default"]
    hold = all(shares[name] <= LIMITS[name] for name in AGENTS) and of_cost <= MOST_COST_OF_SMALL
    print(
        f"small / default cost {of_cost:.3f} (limit {MOST_COST_OF_SMALL}): both limits "
        f"{'hold' if hold else 'do NOT hold'}"
    )
    assert min(cost.values()) >= 1.0
