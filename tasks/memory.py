"""Keeping freed memory while the same large tensors are made step after step.

glibc gives large blocks back to the kernel when they are freed, and the next step pays for every page again: on a CPU
that is half of a training step. It serves the main thread: glibc keeps no blocks of 64 MiB or more for other threads.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# From malloc.h: parameters of mallopt, and what glibc has for them when nothing is set.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULT_TRIM_BYTES, _DEFAULT_MMAP_MAX = 128 * 1024, 65536
_KEPT_BYTES = 2**31 - 1


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let the allocator keep what is freed until the end, then give it back. Does nothing with another C library."""
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc_trim = library.mallopt, library.malloc_trim
    except (AttributeError, OSError):
        yield
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
        mallopt(_TRIM_THRESHOLD, _DEFAULT_TRIM_BYTES)
        malloc_trim(0)
