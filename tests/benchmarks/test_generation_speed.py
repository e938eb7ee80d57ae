"""`make bench`: a 6K-token prompt answered from the full cache and from a budget of 512, in turn, in one run.

Three ways to decode: transformers' own `generate` on its own cache, our loop on a full cache, and our loop on the
compacted one. The agents are untrained: what they keep is no good, but as much as of any policy.
"""

import statistics
import time

import jaxtyping
import pytest
import torch

from kvpolicy import decoding
from kvpolicy.generation import compressed_generate
from kvpolicy.models.loading import load_model
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.policy_set import PolicySet
from kvpolicy.prompts import encode_message

BUDGET, NUM_PROMPT, NUM_NEW, NUM_ROUNDS = 512, 6 * 1024, 48, 2
TEXT = "What is kept of a text is decided by what later words will want to know of it, and not by how it sounds. "


@pytest.mark.benchmark
@pytest.mark.timeout(1200)
def test_decoding_from_a_budget_and_from_everything(embedded_model_folder, monkeypatch):
    model = load_model(str(embedded_model_folder))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks are no part of what users run
    # Answers of the same length: nothing ends one.
    monkeypatch.setattr(model.network.generation_config, "eos_token_id", None)
    monkeypatch.setattr(decoding, "_end_tokens", lambda model: set())
    per_text = len(encode_message(TEXT * 2, model.tokenizer)) - len(encode_message(TEXT, model.tokenizer))
    prompt = TEXT * (NUM_PROMPT // per_text)
    policy = _untrained(model)
    speeds: dict[str, list[float]] = {"transformers, full": [], "full": [], "budget": []}
    for _ in range(NUM_ROUNDS):
        compacted = compressed_generate(model, policy, prompt, budget=BUDGET, max_new_tokens=NUM_NEW)
        full = compressed_generate(model, policy, prompt, budget=None, max_new_tokens=NUM_NEW)
        speeds["budget"].append(compacted.tokens_per_s)
        speeds["full"].append(full.tokens_per_s)
        speeds["transformers, full"].append(_speed_of_transformers(model, prompt))
    memory = full.cache_bytes / compacted.cache_bytes
    print(f"\nprompt {full.num_prompt_tokens} tokens, budget {BUDGET}: {full.num_prompt_tokens / BUDGET:.2f} times")
    mib = [answer.cache_bytes / 2**20 for answer in (full, compacted)]
    print(f"keys and values: {mib[0]:.1f} MiB and {mib[1]:.1f} MiB: {memory:.2f} times")
    for name, found in speeds.items():
        print(f"{name:>20}: {statistics.median(found):6.1f} tokens/s, median of {[round(speed, 1) for speed in found]}")
    for name in ("full", "transformers, full"):
        ratios = [own / other for own, other in zip(speeds["budget"], speeds[name], strict=True)]
        print(f"budget against {name}: {statistics.median(ratios):.2f} times as fast, median of {NUM_ROUNDS} rounds")
    assert memory == full.num_prompt_tokens / BUDGET


def _untrained(model):
    spec = model.spec
    agents = BatchedAgents(
        AgentConfig(), num_heads=spec.num_heads, head_dim=spec.head_dim, generator=torch.Generator().manual_seed(0)
    ).requires_grad_(False)
    return PolicySet(agents=agents, spec=spec, model_digest=model.digest, training={})


class _Clock:
    """Notes when tokens come: the first streamed piece is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _speed_of_transformers(model, prompt):
    ids, clock = torch.tensor([encode_message(prompt, model.tokenizer)]), _Clock()
    with torch.inference_mode():
        model.network.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW, streamer=clock
        )
    times = clock.times[1:]  # without the prompt; from the first new token on
    return (len(times) - 1) / (times[-1] - times[0])
