"""Writers in processes of their own: killed at the worst moments."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from storage.traces.store import TraceStore
from tests.storage.trace_content import trace_sample, write

KILLED = """
import os, signal, sys
from storage.traces.manifest import Manifest
from storage.traces.store import TraceStore
from tests.storage.trace_content import trace_sample, write

Manifest.commit = lambda self, rows: os.kill(os.getpid(), signal.SIGKILL)
write(TraceStore(sys.argv[1]), [trace_sample("b", 20)])
"""


def test_a_writer_killed_before_its_commit_is_not_there(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    write(store, [trace_sample("a", 10)])
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "fragments").iterdir())) == 2
    assert [row.sample_id for row in store.rows("c")] == ["a"]
    assert store.verify() == []
    assert write(store, [trace_sample("b", 20)]).committed == ("b",)  # resuming writes it after all
    assert store.gc(min_age_s=0) == []  # what the dead writer left is the same content, and counts now
    assert [row.sample_id for row in store.snapshot("c").rows] == ["a", "b"]
    assert store.verify() == []
