"""How fast agents train: all heads at once against one after the other, and against what the device can multiply.

On a GPU where there is one, else on the CPU. Keys, values and importance are random numbers of the shapes of the
embedded model and of the paper's: training takes as long on them. Printed by `make bench`.
"""

import dataclasses
import resource
import statistics
import time
from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.training.policy_training import TraceBatch, TrainConfig, train_agents

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEED = 0
ROUNDS = 5
LEAST_RATIO, LEAST_SHARE, MOST_GIB = 5.0, 0.35, 6.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained.

    Attributes:
        agent: Name of the agents.
        num_heads: Heads at once.
        head_dim: Of keys and values.
        num_tokens: Of each sequence.
        num_steps: Steps that are timed, after one that warms up.
    """

    agent: str
    num_heads: int
    head_dim: int
    num_tokens: int
    num_steps: int

    def batch(self) -> TraceBatch:
        """One sequence, in bfloat16 as models make it."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (self.num_heads, 1, self.num_tokens, self.head_dim)
        keys, values = (torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for _ in range(2))
        return TraceBatch(
            keys=keys,
            values=values,
            importance=torch.rand(shape[:3], generator=generator).pow(8).to(DEVICE),
            positions=torch.arange(self.num_tokens, device=DEVICE)[None],
            mask=torch.ones(1, self.num_tokens, dtype=torch.bool, device=DEVICE),
        )

    def seconds_a_step(self) -> float:
        """Of the steps after the first; the loss is read at each, so a GPU has finished it."""
        batch, seconds = self.batch(), []
        train_agents(
            [batch] * (1 + self.num_steps),
            TrainConfig(agent=AgentConfig.named(self.agent), num_steps=1 + self.num_steps, heldout_every_steps=10**6),
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            heldout=lambda: [batch],
            seed=SEED,
            device=DEVICE,
            on_step=lambda record: seconds.append(record.train_s),
        )
        return (seconds[-1] - seconds[0]) / self.num_steps

    @property
    def flops_a_step(self) -> int:
        """Of the matrix products of one step, forward and backward, as torch counts them."""
        batch = self.batch()
        agents = BatchedAgents(
            AgentConfig.named(self.agent),
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            generator=torch.Generator().manual_seed(SEED),
        ).to(DEVICE)
        with FlopCounterMode(display=False) as counted:
            agents(batch.keys.flatten(1, 2), batch.values.flatten(1, 2), batch.positions).sum().backward()
        return counted.get_total_flops()


def products_a_second() -> float:
    """The most that the device multiplies: large square products in float32 and in bfloat16, whichever is faster."""
    size = 16_384 if DEVICE == "cuda" else 2_048
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
        float((left @ right)[0, 0])  # warms up
        started = time.perf_counter()
        for _ in range(ROUNDS):
            product = left @ right
        float(product[0, 0])
        rates.append(2 * size**3 * ROUNDS / (time.perf_counter() - started))
    return max(rates)


def test_heads_train_faster_together_than_one_after_the_other() -> None:
    together = Work(agent="default", num_heads=90, head_dim=64, num_tokens=864, num_steps=10)
    alone = dataclasses.replace(together, num_heads=1, num_steps=30)
    ratios = []
    for turn in range(ROUNDS):
        of_all, of_one = together.seconds_a_step() / together.num_heads, alone.seconds_a_step()
        ratios.append(of_one / of_all)
        print(
            f"\nturn {turn}: {1 / of_all:.0f} agent-steps a second together, {1 / of_one:.0f} alone, "
            f"{ratios[-1]:.1f} times as many",
            end="",
        )
    print(f"\nmedian {statistics.median(ratios):.1f} on {DEVICE}, wanted at least {LEAST_RATIO:.0f}")


def test_heads_of_the_papers_shape_train_in_one_process() -> None:
    work = Work(agent="paper", num_heads=112, head_dim=128, num_tokens=4096, num_steps=3)
    peak = products_a_second()
    seconds = work.seconds_a_step()
    rate = work.flops_a_step / seconds
    most_gib = (
        torch.cuda.max_memory_allocated() / 2**30
        if DEVICE == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )
    print(
        f"\n112 heads, width 256, 4096 tokens on {DEVICE}: {seconds:.2f} s a step, "
        f"{work.num_heads / seconds:.0f} agent-steps a second, {rate / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s = "
        f"{rate / peak:.0%} of what the device multiplies, wanted at least {LEAST_SHARE:.0%}; "
        f"at most {most_gib:.1f} GiB, wanted at most {MOST_GIB:.0f}"
    )
    assert most_gib <= MOST_GIB
