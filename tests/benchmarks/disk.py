"""The disk that the benchmarks compare with: raw reads and writes, and files forgotten by the page cache."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from storage.traces.fragment_content import ARRAYS

_BLOCK_BYTES = 4 << 20


def timed(action: Callable[..., object], *arguments: object) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - started


def write_raw(path: Path, tensors: Iterable[torch.Tensor]) -> None:
    """Write the bytes of tensors to one file, and wait until the disk has them."""
    with path.open("wb", buffering=0) as stream:
        for tensor in tensors:
            content = tensor.view(torch.uint8).numpy().reshape(-1)
            for start in range(0, len(content), _BLOCK_BYTES):
                stream.write(content[start : start + _BLOCK_BYTES].data)
    os.sync()


def read_raw(paths: Sequence[Path], first: int = 0, num_bytes: int = sys.maxsize) -> None:
    """Read files one after the other, each from a byte on, and at most so many bytes of it."""
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            stream.seek(first)
            left = num_bytes
            while left > 0 and (block := stream.read(min(_BLOCK_BYTES, left))):
                left -= len(block)


def forget(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, so that the next read is the disk's."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def files_of(root: Path, head: int | None = None) -> list[Path]:
    """Files of a local trace store that hold traces of one head, or of all."""
    below = "*" if head is None else str(head)
    folders = [folder for name in ARRAYS for folder in (root / "fragments").glob(f"*/{name}/c/{below}")]
    return [path for folder in sorted(folders) for path in folder.rglob("*") if path.is_file()]
