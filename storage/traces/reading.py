"""Traces as they come out of a fragment, compared with the digests of what was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.errors import StorageError
from storage.traces.fragment_content import ARRAYS, Span, head_digests, to_torch
from storage.traces.fragments import REMEDY, Fragment
from storage.traces.manifest import TraceRow

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class TraceTensors:
    """Traces of one sample.

    Attributes:
        keys: (head, token, dim), as they were written.
        values: (head, token, dim), as they were written.
        importance: (head, token) float32.
        positions: (token) int64, the positions of the context tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    importance: torch.Tensor
    positions: torch.Tensor


def read_sample(fragment: Fragment, row: TraceRow, heads: slice) -> TraceTensors:
    """Read consecutive heads of one sample.

    Raises:
        StorageError: if the heads are not consecutive or none, or the traces are missing or damaged.
    """
    first, last, step = heads.indices(fragment.num_heads)
    if step != 1 or last <= first:
        raise StorageError(
            f"heads {heads.start}:{heads.stop}:{heads.step or 1} (first, end, step): expected at least one of 0 to"
            f" {fragment.num_heads - 1}, in consecutive order"
        )
    blocks = [fragment.read(name, (first, last), (row.start, row.stop)) for name in ARRAYS]
    _check(fragment, [row], (first, last), blocks, [(0, row.context_tokens)])
    return _tensors(fragment, blocks)


def read_head(fragment: Fragment, rows: Sequence[TraceRow], head: int) -> list[TraceTensors]:
    """Read one head of samples of a fragment, all that it has of the head at once; views of that.

    Raises:
        StorageError: if there is no such head, or its traces are missing or damaged.
    """
    if not 0 <= head < fragment.num_heads:
        raise StorageError(f"head {head}: expected one of 0 to {fragment.num_heads - 1}")
    blocks, spans = fragment.read_head(head), [(row.start, row.stop) for row in rows]
    _check(fragment, rows, (head, head + 1), blocks, spans)
    return [_tensors(fragment, [block[:, slice(*span)] for block in blocks]) for span in spans]


def _check(
    fragment: Fragment,
    rows: Sequence[TraceRow],
    heads: Span,
    blocks: Sequence[np.ndarray[Any, Any]],
    spans: Sequence[Span],
) -> None:
    """Compare what was read of some heads, and the samples at spans of it, with the digests of what was written."""
    for row, digests in zip(rows, head_digests(blocks, spans), strict=True):
        wrong = np.flatnonzero((digests != fragment.stored_digests(row.start)[slice(*heads)]).any(axis=1))
        if wrong.size:
            raise StorageError(
                f"fragment {row.fragment_id}, sample {row.sample_id}, head {heads[0] + int(wrong[0])}: damaged, its"
                f" content is not what was written; {REMEDY}"
            )


def _tensors(fragment: Fragment, blocks: Sequence[np.ndarray[Any, Any]]) -> TraceTensors:
    import torch

    keys, values, importance = blocks
    return TraceTensors(
        keys=to_torch(keys, fragment.logical_dtype),
        values=to_torch(values, fragment.logical_dtype),
        importance=to_torch(importance, "float32"),
        positions=torch.arange(importance.shape[1]),
    )
