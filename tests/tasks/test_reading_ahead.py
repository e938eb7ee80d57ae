"""Reading traces ahead: what comes out is what was written, in bounded memory, and no thread is left behind."""

import dataclasses
import gc
import threading
import time
from contextlib import closing
from itertools import islice

import pytest
import torch

from kvpolicy.errors import InputError
from kvpolicy.training.policy_training import TraceBatch
from storage.errors import StorageError
from storage.traces.store import TraceSample, TraceStore
from tasks.inputs.stored_traces import _BATCHES_AHEAD, shuffled_batches, single_batches

LENGTHS = (50, 90, 30, 70, 60)
NUM_HEADS, DIM = 4, 8
DEADLINE_S = 10


def _write(root):
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    tensors = {
        "keys": torch.randn(NUM_HEADS, total, DIM, generator=generator).to(torch.bfloat16),
        "values": torch.randn(NUM_HEADS, total, DIM, generator=generator).to(torch.bfloat16),
        "importance": torch.rand(NUM_HEADS, total, generator=generator),
    }
    store = TraceStore(root)
    samples = [
        TraceSample(
            sample_id=f"sample-{index}",
            benchmark="ruler",
            task="vt",
            split="train",
            setting="query_agnostic",
            seed=0,
            prompt_digest=f"{index:064d}",
            context_tokens=length,
        )
        for index, length in enumerate(LENGTHS)
    ]
    store.write_fragment(collection="c", model_digest="m", samples=samples, **tensors)
    return store, tensors


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return _write(tmp_path_factory.mktemp("traces"))


@pytest.fixture
def only_new_objects():
    """Lets the garbage collector list what a test makes, without the million objects that were there before."""
    gc.freeze()
    yield
    gc.unfreeze()


def _batches(store, rows, heads=slice(0, NUM_HEADS), *, seed=0):
    return shuffled_batches(store, rows, heads, batch_sequences=2, seed=seed, device="cpu")


def _reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("traces")]


def _wait_until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def _count_batches():
    return sum(type(found) is TraceBatch for found in gc.get_objects())


def test_batches_hold_what_was_written_bit_for_bit(written):
    store, tensors = written
    rows, heads = store.snapshot("c").rows, slice(1, 3)
    first = 0
    for length, batch in zip(LENGTHS, single_batches(store, rows, heads, "cpu"), strict=True):
        own, read = slice(first, first + length), batch.mask[0]
        assert torch.equal(batch.keys[:, 0, read].view(torch.int16), tensors["keys"][heads, own].view(torch.int16))
        assert torch.equal(batch.values[:, 0, read].view(torch.int16), tensors["values"][heads, own].view(torch.int16))
        assert torch.equal(batch.importance[:, 0, read], tensors["importance"][heads, own])
        assert batch.positions[0, read].tolist() == list(range(length))
        first += length


def test_groups_of_heads_meet_the_same_samples(written):
    store, _ = written
    rows = store.snapshot("c").rows
    with closing(_batches(store, rows)) as whole, closing(_batches(store, rows, slice(2, 4))) as part:
        for of_all, of_some in islice(zip(whole, part, strict=True), 6):
            assert torch.equal(of_all.keys[2:4], of_some.keys)
            assert torch.equal(of_all.positions, of_some.positions)


def test_no_thread_is_left_behind(written):
    store, _ = written
    rows = store.snapshot("c").rows
    batches = _batches(store, rows)
    assert not _reading_threads()
    next(batches)
    assert len(_reading_threads()) == 1
    batches.close()
    assert not _reading_threads()
    dropped = _batches(store, rows)
    next(dropped)
    del dropped
    assert not _reading_threads()


def test_a_reader_that_fails_tells_the_caller_and_ends(written):
    store, _ = written
    rows = [dataclasses.replace(row, fragment_id="0" * 32) for row in store.snapshot("c").rows]
    batches = _batches(store, rows)
    with pytest.raises(StorageError, match="0" * 32):
        next(batches)
    assert not _reading_threads()


@pytest.mark.usefixtures("only_new_objects")
def test_few_batches_are_alive_however_slow_training_is(written):
    store, _ = written
    most = _BATCHES_AHEAD + 1
    with closing(_batches(store, store.snapshot("c").rows)) as batches:
        for _ in range(8):
            batch = next(batches)
            _wait_until(lambda: _count_batches() == most)  # it does read ahead
            time.sleep(0.02)  # time to read more, if reading did not wait for training
            assert _count_batches() == most
            del batch
    assert _count_batches() == 0


def test_nothing_to_read_is_an_error_and_no_endless_wait(written):
    with pytest.raises(InputError, match="no traces"):
        next(_batches(written[0], []))
    assert not _reading_threads()
