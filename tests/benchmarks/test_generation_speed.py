"""`make bench`: a 6K-token prompt answered from the full cache and from a budget of 512, in turn, in one run.

Three ways to decode: transformers' own `generate` on its own cache, our loop on a full cache, and our loop on the
compacted one. The agents are untrained: what they keep is no good, but as much as of any policy.
"""

import statistics
import time

import jaxtyping
import pytest
import torch

from kvpolicy.inference import decoding
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.generation import compressed_generate
from kvpolicy.inference.loading import load_model
from kvpolicy.policies.agent import AgentConfig
from kvpolicy.text.encoded_sample import encode_message
from tests.drawn_policy import draw_policy

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
    policy = draw_policy(model, AgentConfig())
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


@pytest.mark.benchmark
def test_a_step_on_one_cache_and_on_four(embedded_model, monkeypatch):
    """Step by step in turn, on made-up entries: the speed of a step does not depend on what is in the cache."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    spec, generator = embedded_model.spec, torch.Generator().manual_seed(0)
    shape = (spec.num_heads, NUM_PROMPT, spec.head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(embedded_model.dtype) for _ in range(2))
    print()
    for num_rows in (1, 4):
        caches = {}
        for size in (NUM_PROMPT, BUDGET):
            kept = torch.arange(size).expand(spec.num_heads, -1)
            caches[size] = CompactedCache(
                keys, values, [kept] * num_rows, num_kv_heads=spec.num_kv_heads, num_new_tokens=NUM_NEW
            )
        seconds: dict[int, list[float]] = {size: [] for size in caches}
        for step in range(NUM_NEW):
            position = torch.full((num_rows, 1), NUM_PROMPT + step)
            for size, cache in caches.items():
                start = time.perf_counter()
                cache.run(embedded_model, position % 1000, position, num_logits=1)
                seconds[size].append(time.perf_counter() - start)
        full, budget = (statistics.median(found[3:]) for found in seconds.values())  # the first ones warm up
        print(
            f"{num_rows} at once, {NUM_PROMPT} and {BUDGET} entries: {1e3 * full:.0f} and {1e3 * budget:.0f} ms "
            f"a step, {full / budget:.2f} times as fast"
        )


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
