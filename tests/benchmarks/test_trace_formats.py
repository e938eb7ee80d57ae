"""What each way to store traces costs and saves: bytes, rates, and what the policies lose. Real traces, one run.

Prints the table of docs/traces.md.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.names import COMPRESSIONS
from kvpolicy.presets.pipeline_config import load_preset
from kvpolicy.text.encoded_sample import EncodedSample, encode
from kvpolicy.training.collection import CollectConfig, Trace, collect_trace
from kvpolicy.training.policy_training import train_agents
from storage.traces.store import TraceRow, TraceStore
from tasks.inputs.stored_traces import shuffled_batches, single_batches
from tasks.memory import freed_memory_kept
from tests.benchmarks.disk import files_of, forget, timed
from tests.storage.trace_content import trace_sample

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1200)]

PROMPTS = PromptConfig(tasks=("niah_single_1", "vt", "fwe"), length_tokens=1024)
SPLITS = {"train": 8, "validation": 2}
SAMPLES_PER_FRAGMENT = 6
NUM_STEPS = 150
HEADS_READ = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """Traces of one form, and what storing them took."""

    store: TraceStore
    rows: Sequence[TraceRow]
    num_bytes: int
    written_s: float


def _examples(model: LanguageModel) -> Iterator[tuple[str, EncodedSample]]:
    for split, count in SPLITS.items():
        made = generate_samples(PROMPTS, split=split, num_samples_per_task=count, seed=0, tokenizer=model.tokenizer)
        yield from ((split, encode(sample, model.tokenizer)) for sample in made.samples)


def _store(root: Path, traces: Sequence[tuple[str, str, Trace]], compression: str) -> Stored:
    """Write traces (split, sample id, trace), some to a fragment."""
    store, written_s = TraceStore(root, compression=compression), 0.0
    for start in range(0, len(traces), SAMPLES_PER_FRAGMENT):
        part = traces[start : start + SAMPLES_PER_FRAGMENT]
        samples = [trace_sample(name, trace.keys.shape[1], split) for split, name, trace in part]
        tensors = [
            torch.cat([getattr(trace, array) for _, _, trace in part], dim=1)
            for array in ("keys", "values", "importance")
        ]

        def write(samples: list[object], tensors: list[torch.Tensor]) -> None:
            keys, values, importance = tensors
            store.write_fragment(
                collection="c", model_digest="m", samples=samples, keys=keys, values=values, importance=importance
            )
            os.sync()

        written_s += timed(write, samples, tensors)
    num_bytes = sum(path.stat().st_size for path in files_of(root))
    return Stored(store=store, rows=store.snapshot("c").rows, num_bytes=num_bytes, written_s=written_s)


def _read_s(stored: Stored, root: Path) -> float:
    """Median seconds in which one head is read, cold."""

    def scan(head: int) -> None:
        for _ in stored.store.scan(stored.rows, head):
            pass

    seconds = []
    for head in range(HEADS_READ):
        forget(files_of(root, head))
        seconds.append(timed(scan, head))
    return statistics.median(seconds)


def _heldout_cost(stored: Stored, heldout: Stored, num_heads: int, head_dim: int) -> float:
    """Mean held-out cost of policies trained on some traces, judged on the undisturbed ones."""
    heads = slice(0, num_heads)
    config = dataclasses.replace(load_preset("demo").train, num_steps=NUM_STEPS, heldout_every_steps=NUM_STEPS)
    rows = [row for row in stored.rows if row.split == "train"]
    judged = [row for row in heldout.rows if row.split == "validation"]
    batches = shuffled_batches(stored.store, rows, heads, batch_sequences=config.batch_sequences, seed=0, device="cpu")
    with closing(batches), freed_memory_kept():
        _, cost = train_agents(
            batches,
            config,
            num_heads=num_heads,
            head_dim=head_dim,
            heldout=lambda: single_batches(heldout.store, judged, heads, "cpu"),
            seed=0,
            device="cpu",
        )
    return float(cost.mean())


def test_the_forms_of_stored_traces(embedded_model_folder: Path, tmp_path: Path) -> None:
    model = load_language_model(embedded_model_folder, dtype="bfloat16")
    setting = CollectConfig().setting
    whole: list[tuple[str, str, Trace]] = []
    narrow: list[tuple[str, str, Trace]] = []
    for split, example in _examples(model):
        name = example.sample.sample_id
        whole.append((split, name, collect_trace(model, example, setting)))
        narrow.append((split, name, collect_trace(model, example, setting, stored_dtype="float8_e4m3fn")))
    forms = {("bfloat16", name): whole for name in COMPRESSIONS} | {("float8_e4m3fn", "none"): narrow}
    stored = {form: _store(tmp_path / "-".join(form), traces, form[1]) for form, traces in forms.items()}
    plain = stored["bfloat16", "none"]
    costs = {
        dtype: _heldout_cost(stored[dtype, "none"], plain, model.spec.num_heads, model.spec.head_dim)
        for dtype in ("bfloat16", "float8_e4m3fn")
    }
    print(f"\n{len(whole)} samples, {plain.num_bytes / 1e6:.0f} MB as they are; rates count these bytes")
    print("| dtype | compression | size | write, MB/s | cold read of a head, MB/s | held-out cost |")
    print("|---|---|---|---|---|---|")
    for (dtype, compression), form in stored.items():
        read_s = _read_s(form, tmp_path / f"{dtype}-{compression}")
        print(
            f"| {dtype} | {compression} | {form.num_bytes / plain.num_bytes:.2f} |"
            f" {plain.num_bytes / form.written_s / 1e6:.0f} |"
            f" {plain.num_bytes / model.spec.num_heads / read_s / 1e6:.0f} | {costs[dtype]:.3f} |"
        )
    for compression in COMPRESSIONS:
        assert stored["bfloat16", compression].store.snapshot("c").digest == plain.store.snapshot("c").digest
