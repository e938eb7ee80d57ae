"""Keeping freed memory: it stays while it is wanted, and goes back at the end, whatever happens in between."""

import sys
from pathlib import Path

import pytest

from tasks.memory import freed_memory_kept

BLOCK_BYTES = 64 * 2**20
PAGE_BYTES = 4096

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def _use_and_free() -> None:
    block = bytearray(BLOCK_BYTES)
    block[::PAGE_BYTES] = b"x" * len(block[::PAGE_BYTES])


def test_freed_memory_is_kept_until_the_end() -> None:
    before = _resident_bytes()
    with freed_memory_kept():
        _use_and_free()
        assert _resident_bytes() - before > 0.8 * BLOCK_BYTES
    assert _resident_bytes() - before < 0.2 * BLOCK_BYTES
    _use_and_free()
    assert _resident_bytes() - before < 0.2 * BLOCK_BYTES


def test_it_ends_after_a_failure_too() -> None:
    before = _resident_bytes()
    with pytest.raises(KeyError, match="why"), freed_memory_kept():
        _use_and_free()
        raise KeyError("why")
    _use_and_free()
    assert _resident_bytes() - before < 0.2 * BLOCK_BYTES
