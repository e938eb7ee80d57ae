"""The trace store against the disk it lies on, at the paper's shape; and collecting against a plain prefill.

Every ratio is taken in one run, the two sides in turn, so that a slow moment of the disk hits both alike.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from kvpolicy.inference.loading import load_language_model
from kvpolicy.text.encoded_sample import encode
from kvpolicy.text.protocol import cut_sample
from kvpolicy.training.collection import CollectConfig
from storage.traces.store import TraceRow, TraceSample, TraceStore
from tasks.collect import collect_traces
from tests.benchmarks.disk import files_of, forget, read_raw, timed, write_raw
from tests.storage.trace_content import trace_sample

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1200)]

LAYERS, KV_HEADS, DIM = 28, 4, 128  # Qwen2.5-7B
NUM_HEADS = LAYERS * KV_HEADS
SAMPLE_TOKENS, SAMPLES, FRAGMENTS = 4096, 16, 3  # 11.4 GB
HEADS_READ = 16
ROUNDS = 3


def _random_traces(seed: int) -> dict[str, torch.Tensor]:
    """Traces of a fragment; their bits are as hard to compress as any."""
    draws = np.random.default_rng(seed)
    tokens = SAMPLES * SAMPLE_TOKENS

    def bits() -> torch.Tensor:
        drawn = draws.integers(0, 2**16, (NUM_HEADS, tokens, DIM), dtype=np.uint16)
        return torch.from_numpy(drawn).view(torch.bfloat16)

    importance = torch.from_numpy(draws.random((NUM_HEADS, tokens), dtype=np.float32))
    return {"keys": bits(), "values": bits(), "importance": importance}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied at once: pytest keeps its own for a while, and these are large."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def _read_head(store: TraceStore, rows: Sequence[TraceRow], head: int) -> int:
    return sum(trace.keys.shape[1] for _, trace in store.scan(rows, head))


def test_writing_and_reading_against_the_raw_disk(folder: Path) -> None:
    store, ratios = TraceStore(folder / "store"), []
    for number in range(FRAGMENTS):
        traces = _random_traces(number)
        samples = [trace_sample(f"{number}/{index}", SAMPLE_TOKENS) for index in range(SAMPLES)]

        def write_ours(samples: list[TraceSample], traces: dict[str, torch.Tensor]) -> None:
            store.write_fragment(collection="c", model_digest="m", samples=samples, **traces)
            os.sync()

        # One before and one after, since the disk has its moods.
        before_s = timed(write_raw, folder / f"raw-{number}.bin", traces.values())
        ours_s = timed(write_ours, samples, traces)
        after_s = timed(write_raw, folder / "raw.bin", traces.values())
        (folder / "raw.bin").unlink()
        if number:
            (folder / f"raw-{number}.bin").unlink()
        gigabytes = sum(tensor.nbytes for tensor in traces.values()) / 1e9
        ratios.append((before_s + after_s) / 2 / ours_s)
        rates = f"{gigabytes / ours_s:.2f} GB/s, raw {gigabytes / before_s:.2f} and {gigabytes / after_s:.2f}"
        print(f"\nwriting {gigabytes:.1f} GB: {rates}, ratio {ratios[-1]:.2f}", end="")
    print(f"\nwriting: {statistics.median(ratios):.2f} of the raw disk's rate, median (asked: 0.60)")

    rows = store.snapshot("c").rows
    measured: dict[str, list[float]] = {}
    for head in range(HEADS_READ):
        files, one_file = files_of(folder / "store", head), folder / "raw-0.bin"  # as old as the store
        size = sum(path.stat().st_size for path in files)
        seconds = {}
        forget([one_file])
        seconds["one contiguous file"] = timed(read_raw, [one_file], head * size, size)
        forget(files)
        seconds["the same files"] = timed(read_raw, files)
        forget(files)
        seconds["ours"] = timed(_read_head, store, rows, head)
        for name, value in seconds.items():
            measured.setdefault(name, []).append(value)
        if head < 3:
            rates = ", ".join(f"{name} {size / value / 1e9:.2f}" for name, value in seconds.items())
            print(f"reading head {head}, {size / 1e6:.0f} MB, GB/s: {rates}")
    ours = measured.pop("ours")
    for name, raw_s in measured.items():
        ratio = statistics.median(one / other for one, other in zip(raw_s, ours, strict=True))
        print(f"reading a head over all samples, cold: {ratio:.2f} of the raw rate of {name}, median (asked: 0.70)")
    assert len(rows) == FRAGMENTS * SAMPLES


def test_collecting_against_a_plain_prefill(embedded_model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = load_language_model(embedded_model_folder, dtype="bfloat16")
    network = AutoModelForCausalLM.from_pretrained(embedded_model_folder, dtype=torch.bfloat16, local_files_only=True)
    prompts = PromptConfig(tasks=("niah_single_1", "vt", "cwe", "fwe"), length_tokens=2048)
    samples = generate_samples(
        prompts, split="train", num_samples_per_task=1, seed=0, tokenizer=model.tokenizer
    ).samples
    examples = [encode(sample, model.tokenizer) for sample in samples]
    config, store = CollectConfig(), TraceStore(tmp_path / "store")

    def plain() -> None:
        for example in examples:
            token_ids = torch.tensor([example.context_ids + example.question_ids + example.answer_ids])
            with torch.inference_mode():
                network(input_ids=token_ids, use_cache=True, logits_to_keep=1)

    def collect(collection: str) -> None:
        keys, values, importance = collect_traces(model, examples, config)
        store.write_fragment(
            collection=collection,
            model_digest="m",
            samples=[
                trace_sample(example.sample.sample_id, cut_sample(example, config.setting).num_context)
                for example in examples
            ],
            keys=keys,
            values=values,
            importance=importance,
        )

    plain()
    ratios = []
    for number in range(ROUNDS):
        before_s, ours_s, after_s = timed(plain), timed(collect, f"round {number}"), timed(plain)
        ratios.append(ours_s / ((before_s + after_s) / 2) - 1)
        print(
            f"\nplain prefill {before_s:.1f} s and {after_s:.1f} s, collected {ours_s:.1f} s: {ratios[-1]:+.0%}", end=""
        )
    print(f"\ncollecting adds {statistics.median(ratios):.0%} to a plain prefill, written too (asked: at most 25 %)")
    assert len(store.rows()) == ROUNDS * len(examples)
