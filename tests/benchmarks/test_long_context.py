"""Contexts of 8K tokens at a budget of 512 in chunks of 1K: what they take, and what evicting early costs.

Memory: the peak above the loaded model, each run in a process of its own, against a run that keeps the full cache.
Fidelity: KL to the full cache over question and reference answer, with the context compressed chunk by chunk and all at
once, by the same method at the same budget, paired over samples. The policy is trained here, on short prompts.
Printed by `make bench`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from kvpolicy.evaluation.contexts import context_state
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.likelihood import kl_divergence
from kvpolicy.inference.streaming import StreamedCaches, StreamedRow
from kvpolicy.methods.base import Method, kept_by_method
from kvpolicy.methods.registry import make_method
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.policies.policy_set import PolicySet
from kvpolicy.results.statistics import Bootstrap
from kvpolicy.text.encoded_sample import EncodedSample, encode
from kvpolicy.text.protocol import cut_sample
from kvpolicy.training.policy_training import TrainConfig, train_agents
from tests.benchmarks.long_context_memory import ENVIRONMENT
from tests.benchmarks.ruler_traces import collect_ruler_traces

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]

LENGTH_TOKENS, BUDGET, CHUNK_TOKENS = 8192, 512, 1024
SAMPLES_PER_TASK = 1  # of the six tasks that need no outside text
TRAIN_LENGTH_TOKENS, TRAIN_STEPS = 1024, 60
MEMORY_LIMIT = 0.4


def test_memory_of_chunks_against_the_full_cache(embedded_model_folder: Path) -> None:
    peaks = {name: _peak_bytes(embedded_model_folder, name) for name in ("full", "kvp", "snapkv")}
    print(f"\n{LENGTH_TOKENS} tokens, budget {BUDGET}, chunks of {CHUNK_TOKENS}; peak above the loaded model")
    for name, peak in peaks.items():
        ratio = peak / peaks["full"]
        verdict = "" if name == "full" else f", asked for at most {MEMORY_LIMIT:.0%}: "
        verdict += "" if name == "full" else "holds" if ratio <= MEMORY_LIMIT else "falls short"
        print(f"  {name:8} {peak / 2**20:6.0f} MiB  {ratio:6.1%} of the full cache's run{verdict}")


def _peak_bytes(folder: Path, name: str) -> int:
    numbers = map(str, (LENGTH_TOKENS, BUDGET, CHUNK_TOKENS))
    command = [sys.executable, "-m", "tests.benchmarks.long_context_memory", str(folder), name, *numbers]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_fidelity_of_chunks_against_one_ranking(embedded_model: Any) -> None:
    methods = [make_method("kvp", policy=_train(embedded_model)), make_method("snapkv")]
    config = PromptConfig(length_tokens=LENGTH_TOKENS)
    tokenizer = embedded_model.tokenizer
    prompts = generate_samples(config, split="test", num_samples_per_task=SAMPLES_PER_TASK, seed=0, tokenizer=tokenizer)
    found = np.array([_divergences(embedded_model, encode(s, tokenizer), methods) for s in prompts.samples])
    print(f"\nKL to the full cache in nats, {len(found)} samples of up to {LENGTH_TOKENS} tokens, budget {BUDGET}")
    for index, method in enumerate(methods):
        once, chunked = found[:, index, 0], found[:, index, 1]
        for name, values in (("at once", once), (f"in chunks of {CHUNK_TOKENS}", chunked)):
            interval = Bootstrap(seed=0).mean(values)
            print(f"  {method.name:7} {name:18} {interval.mean:.4f} [{interval.low:.4f}, {interval.high:.4f}]")
        difference = Bootstrap(seed=0).mean(chunked - once)
        agrees = "differs" if difference.excludes_zero else "agrees within its interval"
        print(
            f"  {method.name:7} chunks - at once   {difference.mean:+.4f} [{difference.low:+.4f}, "
            f"{difference.high:+.4f}], {chunked.mean() / once.mean():.2f} x: {agrees}"
        )


def _train(model: LanguageModel) -> PolicySet:
    """A policy for all heads, in a minute or two."""
    heads = range(model.spec.num_heads)
    traces = collect_ruler_traces(
        model, num_train=2, num_heldout=1, length_tokens=TRAIN_LENGTH_TOKENS, heads=heads, seed=0
    )
    agents, cost = train_agents(
        traces.batches(sequences=2, seed=0),
        TrainConfig(num_steps=TRAIN_STEPS, heldout_every_steps=TRAIN_STEPS),
        num_heads=traces.num_heads,
        head_dim=traces.head_dim,
        heldout=traces.heldout_batches,
        seed=0,
    )
    print(f"\nkvp: {TRAIN_STEPS} steps on {TRAIN_LENGTH_TOKENS} tokens, held-out cost {float(cost.mean()):.2f}")
    return PolicySet(agents=agents, spec=model.spec, model_digest="", training={})


def _divergences(model: LanguageModel, example: EncodedSample, methods: Sequence[Method]) -> list[list[float]]:
    """For each method, the divergence with one ranking and with one a chunk."""
    cut = cut_sample(example, "query_agnostic")
    n, shape = cut.num_context, (len(methods), cut.num_future - 1)
    ids = torch.tensor(example.context_ids + example.question_ids + example.answer_ids)
    future = ids[n:-1].expand(shape)  # the last token of the answer predicts nothing that the reference knows
    positions = (n + torch.arange(shape[1])).expand(shape)
    whole = prefill(model, ids, num_queries=cut.num_future + 64, num_logits=cut.num_future)
    state = context_state(whole, n)
    once = CompactedCache(
        state.keys,
        state.values,
        [kept_by_method(method, state, method.score(state), BUDGET) for method in methods],
        num_kv_heads=whole.num_kv_heads,
        num_new_tokens=shape[1],
    )
    rows = [StreamedRow(method=method, budget=BUDGET) for method in methods]
    chunked = StreamedCaches(model, rows, interval_tokens=CHUNK_TOKENS)
    context = ids[:n].expand(len(methods), -1)
    chunked.run(model, context, torch.arange(n).expand(context.shape), num_logits=0)
    chunked.evict_every(shape[1] + 1)  # everything that comes now stays
    divergences = [
        kl_divergence(whole.logits[:-1], cache.run(model, future, positions, num_logits=shape[1])).mean(dim=1)
        for cache in (once, chunked)
    ]
    return torch.stack(divergences, dim=1).tolist()
