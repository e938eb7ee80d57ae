"""Writers in processes of their own: killed at the worst moment, and racing for the same samples."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from storage.traces import TraceStore
from tests.storage.trace_content import tensors, trace_sample, write

KILLED = """
import os, signal, sys
from storage.manifest import Manifest
from storage.traces import TraceStore
from tests.storage.trace_content import trace_sample, write

Manifest.commit = lambda self, rows: os.kill(os.getpid(), signal.SIGKILL)
write(TraceStore(sys.argv[1]), [trace_sample("b", 20)])
"""

RACING = """
import sys
from storage.traces import TraceStore
from tests.storage.trace_content import trace_sample, write

store = TraceStore(sys.argv[1])
names = sys.argv[2].split(",")
print("ready", flush=True)
sys.stdin.readline()
for name in names:
    print(*write(store, [trace_sample(name, 20)]).committed, flush=True)
"""


def test_a_writer_killed_before_its_commit_is_not_there(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    write(store, [trace_sample("a", 10)])
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "fragments").iterdir())) == 2
    assert store.committed_samples("c") == {"a"}
    assert store.verify() == []
    assert write(store, [trace_sample("b", 20)]).committed == ("b",)  # resuming writes it after all
    assert store.gc(min_age_s=0) == []  # what the dead writer left is the same content, and counts now
    assert [row.sample_id for row in store.snapshot("c").rows] == ["a", "b"]
    assert store.verify() == []


def test_two_writers_commit_each_sample_once(tmp_path: Path) -> None:
    names = [f"s{index}" for index in range(8)]
    orders = (names, names[:2] + names[:1:-1])  # both begin a new store with the same sample
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", RACING, str(tmp_path / "store"), ",".join(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for order in orders
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdin is not None
        assert writer.stdout.readline() == "ready\n"
    outputs = [writer.communicate("go\n", timeout=120)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert sorted(outputs[0] + outputs[1]) == names
    store = TraceStore(tmp_path / "store")
    rows = store.snapshot("c").rows
    assert [row.sample_id for row in rows] == names
    store.gc(min_age_s=0)
    assert store.verify() == []
    assert all(store.read(row).keys.equal(tensors(3, 20, 4)["keys"]) for row in rows)
