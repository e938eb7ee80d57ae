"""Keeping freed memory: it stays while it is wanted, and goes back at the end, whatever happens in between.

In processes of their own: in one that ran other tests, a hole in the heap may take the block, and keep it.
"""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")

MEASURE = """
from pathlib import Path
from tasks.memory import freed_memory_kept

BLOCK_BYTES, PAGE_BYTES = 64 * 2**20, 4096

def kept():
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return (resident - before) / BLOCK_BYTES

def use_and_free():
    block = bytearray(BLOCK_BYTES)
    block[::PAGE_BYTES] = b"x" * len(block[::PAGE_BYTES])

before = 0
before = kept() * BLOCK_BYTES
"""


def _measure(script: str) -> list[float]:
    """Shares of a block that a process says it has kept."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE + script], capture_output=True, text=True, check=True, timeout=60
    )
    return [float(line) for line in done.stdout.split()]


def test_freed_memory_is_kept_until_the_end() -> None:
    within, after, later = _measure(
        "with freed_memory_kept():\n    use_and_free()\n    print(kept())\nprint(kept())\nuse_and_free()\nprint(kept())"
    )
    assert within > 0.8
    assert max(after, later) < 0.2


def test_it_ends_after_a_failure_too() -> None:
    script = """
try:
    with freed_memory_kept():
        use_and_free()
        raise KeyError("why")
except KeyError as error:
    print(len(error.args))
use_and_free()
print(kept())
"""
    raised, after = _measure(script)
    assert raised == 1
    assert after < 0.2
