"""Verification of the trace store: every committed byte read again, and damage named by sample and head.

It reads with zarr's own codecs, which check every chunk, and then compares each head of each sample with its stored
digest and each sample with the digest in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from storage import fragments
from storage.errors import StorageError
from storage.fragments import ARRAYS, Fragment, Span
from storage.manifest import TraceRow
from storage.tables import one_line


@dataclass(frozen=True, kw_only=True)
class TraceProblem:
    """Damage that `storage.traces.TraceStore.verify` found.

    Attributes:
        fragment_id: the fragment.
        sample_id: the damaged sample.
        head: the damaged KV head; None when it cannot be told or all are.
        message: what is wrong.
    """

    fragment_id: str
    sample_id: str
    head: int | None
    message: str

    def __str__(self) -> str:
        where = "all heads" if self.head is None else f"head {self.head}"
        return f"fragment {self.fragment_id}, sample {self.sample_id}, {where}: {self.message}"


def verify_fragment(folder: Path, rows: Sequence[TraceRow]) -> Iterator[TraceProblem]:
    """Yield the damage of a fragment.

    Args:
        folder: the fragment's folder.
        rows: its committed samples.
    """

    def problem(row: TraceRow, head: int | None, message: str) -> TraceProblem:
        return TraceProblem(fragment_id=folder.name, sample_id=row.sample_id, head=head, message=message)

    try:
        if fragments.metadata_digest(folder) != rows[0].metadata_digest:
            raise StorageError("its metadata documents changed after the commit")
        fragment = Fragment.open(folder, check_all=True)
        stored = np.stack([fragment.stored_digests(row.start) for row in rows])
    except StorageError as error:
        yield from (problem(row, None, str(error)) for row in rows)
        return
    actual = np.zeros_like(stored)
    damaged: set[str] = set()
    for head in range(fragment.num_heads):
        try:
            actual[:, head] = _hash_rows(fragment, head, (0, fragment.num_tokens), rows)
        except StorageError as error:
            message = one_line(error.__cause__ or error)
            # What no sample trips over alone, an index or padding, belongs to every sample of the shard.
            found = _find_damaged(fragment, head, rows, actual[:, head]) or rows
        else:
            message = "its content differs from its digest, though every checksum holds"
            differs = (actual[:, head] != stored[:, head]).any(axis=1)
            found = [row for row, is_wrong in zip(rows, differs, strict=True) if is_wrong]
        damaged.update(row.sample_id for row in found)
        yield from (problem(row, head, message) for row in found)
    for row, heads in zip(rows, actual, strict=True):
        digest = fragments.sample_digest(
            row.sample_id, fragment.logical_dtype, fragment.dims, row.context_tokens, heads
        )
        if digest != row.sample_digest and row.sample_id not in damaged:
            yield problem(row, None, "it is whole, but not what was committed")


def _find_damaged(
    fragment: Fragment, head: int, rows: Sequence[TraceRow], digests: np.ndarray[Any, Any]
) -> Sequence[TraceRow]:
    """Read each sample of a damaged shard alone; fill in the (sample, 32) digests of the whole, return the others."""
    found = []
    for index, row in enumerate(rows):
        try:
            digests[index] = _hash_rows(fragment, head, (row.start, row.stop), [row])[0]
        except StorageError:
            found.append(row)
    return found


def _hash_rows(fragment: Fragment, head: int, span: Span, rows: Sequence[TraceRow]) -> np.ndarray[Any, Any]:
    """Read tokens of one head and return the (sample, 32) digests of the rows in them."""
    keys, values, importance = (fragment.read(array, (head, head + 1), span) for array in ARRAYS)
    spans = [(row.start - span[0], row.stop - span[0]) for row in rows]
    digests: np.ndarray[Any, Any] = fragments.head_digests(keys, values, importance, spans)[:, 0]
    return digests
