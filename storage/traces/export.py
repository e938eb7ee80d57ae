"""Traces for other programs: chosen heads of a collection as Parquet or safetensors.

Parquet is written sample by sample; safetensors needs all of it in memory at once.

Not for training here, which reads the store itself (`storage.traces.store`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.errors import first_line
from storage.errors import StorageError
from storage.traces.manifest import TraceRow
from storage.traces.store import TraceStore, TraceTensors
from storage.whole_files import replaced

if TYPE_CHECKING:
    import pyarrow as pa

EXPORT_FORMATS = ("parquet", "safetensors")


def export_traces(
    store: TraceStore, rows: Sequence[TraceRow], heads: Sequence[int], place: Path, *, file_format: str
) -> int:
    """Write chosen heads of samples to one new file.

    Parquet has a row for each sample, head and token: `sample_id`, `head`, `position`, `importance`, and `key` and
    `value` as lists of float32. Safetensors has `<sample_id>/keys` and `/values` (head, token, dim), `/importance`
    (head, token) and `/positions` (token), in the types in which they are stored, the heads in the order given.

    Args:
        store: the store.
        rows: the samples.
        heads: KV heads.
        place: the file; what is there is replaced once the new one is whole.
        file_format: one of `EXPORT_FORMATS`.

    Returns:
        Bytes of the file.

    Raises:
        StorageError: if there is nothing to write, a head does not exist, traces are damaged, or the file cannot be
            written.
    """
    if file_format not in EXPORT_FORMATS:
        raise StorageError(f"export format {file_format!r}: expected one of {', '.join(EXPORT_FORMATS)}")
    if not rows or not heads:
        raise StorageError(f"export: {len(rows)} samples and {len(heads)} heads, expected at least one of each")
    write = _write_parquet if file_format == "parquet" else _write_safetensors
    try:
        with replaced(place) as draft:
            write(_read(store, rows, heads), heads, draft)
    except OSError as error:
        raise StorageError(f"cannot write {place}: {first_line(error)}; choose another --out") from error
    return place.stat().st_size


def _read(
    store: TraceStore, rows: Sequence[TraceRow], heads: Sequence[int]
) -> Iterator[tuple[TraceRow, list[TraceTensors]]]:
    """Each sample with the traces of each head."""
    for row in rows:
        yield row, [store.read(row, slice(head, head + 1)) for head in heads]


def _write_parquet(samples: Iterator[tuple[TraceRow, list[TraceTensors]]], heads: Sequence[int], place: Path) -> None:
    import pyarrow.parquet as pq

    writer: Any = None
    try:
        for row, traces in samples:
            for head, trace in zip(heads, traces, strict=True):
                table = _table(row, head, trace)
                writer = writer or pq.ParquetWriter(place, table.schema)
                writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def _table(row: TraceRow, head: int, trace: TraceTensors) -> pa.Table:
    import pyarrow as pa

    num_tokens = len(trace.positions)

    def vectors(tensor: Any) -> pa.FixedSizeListArray:
        flat = tensor[0].float().contiguous().view(-1).numpy()
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), tensor.shape[2])

    return pa.table(
        {
            "sample_id": pa.array([row.sample_id] * num_tokens).dictionary_encode(),
            "head": pa.array([head] * num_tokens, pa.int32()),
            "position": pa.array(trace.positions.numpy()),
            "importance": pa.array(trace.importance[0].numpy()),
            "key": vectors(trace.keys),
            "value": vectors(trace.values),
        }
    )


def _write_safetensors(
    samples: Iterator[tuple[TraceRow, list[TraceTensors]]], heads: Sequence[int], place: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    content = {}
    for row, traces in samples:
        for name in ("keys", "values", "importance"):
            content[f"{row.sample_id}/{name}"] = torch.cat([getattr(trace, name) for trace in traces])
        content[f"{row.sample_id}/positions"] = traces[0].positions
    save_file(content, place, metadata={"heads": ",".join(str(head) for head in heads)})
