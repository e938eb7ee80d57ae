"""A snapshot is what it holds, wherever its manifest went."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpolicy.digests import short_id
from kvpolicy.errors import InputError
from storage.traces.store import TraceStore
from tasks.framework.references import SnapshotRef
from tasks.inputs.stored_traces import snapshot_rows
from tests.storage.trace_content import trace_sample, write


def test_a_snapshot_is_found_in_a_manifest_made_anew_and_not_where_content_differs(tmp_path: Path) -> None:
    old, new, other = (TraceStore(tmp_path / name) for name in ("old", "new", "other"))
    write(old, [trace_sample("a", 10)])
    taken = old.snapshot("c")
    ref = SnapshotRef(
        artifact_id=short_id("trace_snapshot", taken.digest),
        collection="c",
        manifest_version=taken.manifest_version,
        setting="query_agnostic",
    )
    write(new, [trace_sample("z", 5)], "another")  # so that the recorded version has none of these samples
    write(new, [trace_sample("a", 10)])
    write(other, [trace_sample("a", 10)], seed=1)
    assert [row.sample_id for row in snapshot_rows(old, ref)] == ["a"]
    assert [row.sample_digest for row in snapshot_rows(new, ref)] == [taken.rows[0].sample_digest]
    for store in (other, TraceStore(tmp_path / "empty")):
        with pytest.raises(InputError, match="no longer in the trace store"):
            snapshot_rows(store, ref)
