"""From stored traces to batches: order by seed, padding, reading ahead."""

from collections import Counter
from itertools import islice

import pytest
import torch

from storage.traces.store import TraceSample, TraceStore
from tasks.inputs.stored_traces import _PADDING_TOKENS, read_batch, shuffled_batches, single_batches

LENGTHS = (5, 9, 3, 7, 6)
NUM_HEADS, DIM = 4, 8


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TraceStore:
    store = TraceStore(tmp_path_factory.mktemp("traces"))
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    store.write_fragment(
        collection="c",
        model_digest="m",
        samples=[
            TraceSample(
                sample_id=f"sample-{length}",
                benchmark="ruler",
                task="vt",
                split="train",
                setting="query_agnostic",
                seed=0,
                prompt_digest=f"{length:064d}",
                context_tokens=length,
            )
            for length in LENGTHS
        ],
        keys=torch.randn(NUM_HEADS, total, DIM, generator=generator).to(torch.bfloat16),
        values=torch.randn(NUM_HEADS, total, DIM, generator=generator).to(torch.bfloat16),
        importance=torch.rand(NUM_HEADS, total, generator=generator),
    )
    return store


@pytest.fixture(scope="module")
def rows(store: TraceStore):
    return store.snapshot("c").rows


def _lengths(batch) -> list[int]:
    return batch.mask.sum(dim=1).tolist()


def _draw(store, rows, num_batches, *, seed, batch_sequences=2):
    batches = shuffled_batches(
        store, rows, slice(0, NUM_HEADS), batch_sequences=batch_sequences, seed=seed, device="cpu"
    )
    drawn = list(islice(batches, num_batches))
    batches.close()
    return drawn


def test_a_batch_is_padded_to_its_longest_sample_rounded_up(store, rows):
    picked = [row for row in rows if row.context_tokens in (9, 3)]
    batch, width = read_batch(store, picked, slice(1, 3)), _PADDING_TOKENS
    assert batch.keys.shape == batch.values.shape == (2, 2, width, DIM)
    assert batch.importance.shape == (2, 2, width)
    for index, row in enumerate(picked):
        alone, length = store.read(row, slice(1, 3)), row.context_tokens
        assert torch.equal(batch.keys[:, index, :length], alone.keys)
        assert torch.equal(batch.values[:, index, :length], alone.values)
        assert torch.equal(batch.importance[:, index, :length], alone.importance)
        assert torch.equal(batch.positions[index, :length], alone.positions)
        assert batch.mask[index].tolist() == [True] * length + [False] * (width - length)
        assert not batch.importance[:, index, length:].any()


def test_every_epoch_has_every_sample_once(store, rows):
    drawn = [length for batch in _draw(store, rows, 15, seed=3, batch_sequences=1) for length in _lengths(batch)]
    epochs = [drawn[start : start + 5] for start in (0, 5, 10)]
    assert all(Counter(epoch) == Counter(LENGTHS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_seed_alone_decides_the_order(store, rows):
    first, second, other = ([_lengths(batch) for batch in _draw(store, rows, 10, seed=seed)] for seed in (1, 1, 2))
    assert first == second != other


def test_a_batch_may_reach_over_the_end_of_an_epoch(store, rows):
    drawn = [length for batch in _draw(store, rows, 5, seed=0) for length in _lengths(batch)]
    assert Counter(drawn) == Counter(LENGTHS * 2)


def test_single_batches_are_the_samples_in_their_order(store, rows):
    lengths = [_lengths(batch) for batch in single_batches(store, rows, slice(0, 2), "cpu")]
    assert lengths == [[row.context_tokens] for row in rows]
