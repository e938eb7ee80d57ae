"""Verification of the trace store: every committed byte read again, and damage named by sample and head.

Every head is read whole, which also checks what lies beside compressed content, and each sample of it is compared with
its stored digest and with the digest in the manifest. Where a head cannot be read whole, its samples are read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpolicy.errors import first_line
from storage.errors import StorageError, remedy_for
from storage.traces import fragments
from storage.traces.fragment_content import ARRAYS, head_digests, sample_digest
from storage.traces.fragments import Fragment
from storage.traces.manifest import TraceRow
from storage.traces.places import Place

_READERS = 2


@dataclass(frozen=True, kw_only=True)
class TraceProblem:
    """Damage that `storage.traces.store.TraceStore.verify` found.

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


def verify_fragment(place: Place, fragment_id: str, rows: Sequence[TraceRow]) -> Iterator[TraceProblem]:
    """Yield the damage of a fragment.

    Args:
        place: the store's place.
        fragment_id: the fragment.
        rows: its committed samples.

    Raises:
        StorageError: if the place is busy, refuses or cannot be reached, which says nothing of what lies there.
    """

    def problem(row: TraceRow, head: int | None, message: str) -> TraceProblem:
        return TraceProblem(fragment_id=fragment_id, sample_id=row.sample_id, head=head, message=message)

    try:
        if fragments.metadata_digest(place, fragment_id) != rows[0].metadata_digest:
            raise StorageError("its metadata documents changed after the commit")
        fragment = Fragment.open(place, fragment_id)
        stored = np.stack([fragment.stored_digests(row.start) for row in rows])
    except StorageError as error:
        _require_damage(error)
        yield from (problem(row, None, str(error)) for row in rows)
        return
    actual = np.zeros_like(stored)
    damaged: set[str] = set()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="verify") as readers:
        heads = range(fragment.num_heads)
        for head, read in enumerate(readers.map(lambda head: _try(_hash_head, fragment, head, rows), heads)):
            if isinstance(read, StorageError):
                message = first_line(read.__cause__ or read)
                # What no sample trips over alone, an index or padding, belongs to every sample of the head.
                broken = _find_damaged(fragment, head, rows, actual[:, head]) or rows
            else:
                message = "its content is not what was written"
                actual[:, head] = read
                differs = (read != stored[:, head]).any(axis=1)
                broken = [row for row, is_wrong in zip(rows, differs, strict=True) if is_wrong]
            damaged.update(row.sample_id for row in broken)
            yield from (problem(row, head, message) for row in broken)
    for row, digests in zip(rows, actual, strict=True):
        digest = sample_digest(row.sample_id, fragment.logical_dtype, fragment.dims, row.context_tokens, digests)
        if digest != row.sample_digest and row.sample_id not in damaged:
            yield problem(row, None, "it is whole, but not what was committed")


def _try(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or the error that it raises: one damaged head must not hide the next."""
    try:
        return function(*arguments)
    except StorageError as error:
        _require_damage(error)
        return error


def _require_damage(error: StorageError) -> None:
    """Re-raise errors of the store: only a damaged fragment may be reported, as reports lead to deletion."""
    if remedy_for(error.__cause__ or error):
        raise error


def _hash_head(fragment: Fragment, head: int, rows: Sequence[TraceRow]) -> np.ndarray[Any, Any]:
    """Read a head and return the (sample, 32) digests of the rows."""
    spans = [(row.start, row.stop) for row in rows]
    digests: np.ndarray[Any, Any] = head_digests(fragment.read_head(head), spans)[:, 0]
    return digests


def _find_damaged(
    fragment: Fragment, head: int, rows: Sequence[TraceRow], digests: np.ndarray[Any, Any]
) -> Sequence[TraceRow]:
    """Read each sample of a damaged head alone; fill in the (sample, 32) digests of the whole, return the others."""
    damaged = []
    for index, row in enumerate(rows):
        try:
            blocks = [fragment.read(name, (head, head + 1), (row.start, row.stop)) for name in ARRAYS]
        except StorageError as error:
            _require_damage(error)
            damaged.append(row)
            continue
        digests[index] = head_digests(blocks, [(0, row.context_tokens)])[0, 0]
        if (digests[index] != fragment.stored_digests(row.start)[head]).any():
            damaged.append(row)
    return damaged
