"""From rows of the trace store to batches for training: shuffled by seed, read ahead, in bounded memory."""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

from kvpolicy.digests import short_id
from kvpolicy.errors import InputError
from kvpolicy.seeds import derive_seed
from kvpolicy.training.policy_training import TraceBatch
from storage.traces.store import TraceRow, TraceSnapshot, TraceStore
from tasks.framework.references import SnapshotRef

_BATCHES_AHEAD = 2
# Lengths are rounded up, so that tensors of few sizes follow each other and the allocator can reuse what was freed.
_PADDING_TOKENS = 128


def snapshot_rows(store: TraceStore, snapshot: SnapshotRef) -> Sequence[TraceRow]:
    """Samples of a snapshot: at its version of the manifest or, where that was made anew since, of the same content.

    Raises:
        InputError: If neither is there.
        StorageError: If the store cannot be read.
    """
    latest = store.version()
    for version in dict.fromkeys((min(snapshot.manifest_version, latest), latest)):
        rows = sorted(store.rows(snapshot.collection, version=version), key=lambda row: row.sample_id)
        present = TraceSnapshot(collection=snapshot.collection, manifest_version=version, rows=tuple(rows))
        if short_id("trace_snapshot", present.digest) == snapshot.artifact_id:
            return present.rows
    raise InputError(f"{snapshot.artifact_id} is no longer in the trace store: run `kvp collect` with the same options")


def shuffled_batches(
    store: TraceStore, rows: Sequence[TraceRow], heads: slice, *, batch_sequences: int, seed: int, device: str
) -> Generator[TraceBatch, None, None]:
    """Batches without end, epoch after epoch; their order depends on the seed alone.

    Reading runs in one thread, at most `_BATCHES_AHEAD` batches ahead of training.

    Raises:
        InputError: If there are no rows.
    """
    if not rows:
        raise InputError("train: there are no traces to train on: collect some first")
    order = _endless_order(len(rows), torch.Generator().manual_seed(derive_seed(seed, "order")))
    picks = iter(lambda: [rows[index] for index in islice(order, batch_sequences)], None)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="traces") as reader:
        ahead = [reader.submit(read_batch, store, next(picks), heads) for _ in range(_BATCHES_AHEAD)]
        while True:
            ahead.append(reader.submit(read_batch, store, next(picks), heads))
            yield _to_device(ahead.pop(0).result(), device)


def single_batches(store: TraceStore, rows: Sequence[TraceRow], heads: slice, device: str) -> Iterator[TraceBatch]:
    """Each sample as a batch of its own, in the order of the rows."""
    return (_to_device(read_batch(store, [row], heads), device) for row in rows)


def read_batch(store: TraceStore, rows: Sequence[TraceRow], heads: slice) -> TraceBatch:
    """Read samples and pad them to the longest, rounded up."""
    traces = [store.read(row, heads) for row in rows]
    num_heads, _, dim = traces[0].keys.shape
    stored = traces[0].keys.dtype
    dtype = torch.bfloat16 if stored.itemsize == 1 else stored  # nothing can be computed in 8-bit floats
    longest = max(trace.keys.shape[1] for trace in traces)
    longest += -longest % _PADDING_TOKENS
    keys = torch.zeros(num_heads, len(rows), longest, dim, dtype=dtype)
    values = torch.zeros_like(keys)
    importance = torch.zeros(num_heads, len(rows), longest)
    positions = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, trace in enumerate(traces):
        length = trace.keys.shape[1]
        keys[:, index, :length], values[:, index, :length] = trace.keys, trace.values
        importance[:, index, :length] = trace.importance
        positions[index, :length], mask[index, :length] = trace.positions, True
    return TraceBatch(keys=keys, values=values, importance=importance, positions=positions, mask=mask)


def _endless_order(num_rows: int, generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from torch.randperm(num_rows, generator=generator).tolist()


def _to_device(batch: TraceBatch, device: str) -> TraceBatch:
    if device == "cpu":
        return batch
    return TraceBatch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(batch).items()})
