"""What the manifest counts over millions of rows is what a loop over its rows counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.traces.manifest import Manifest, TraceCollection, TraceRow
from storage.traces.store import TraceStore
from tests.storage.trace_content import trace_sample, write


def trace_row(collection: str, sample_id: str, fragment_id: str, split: str, tokens: int) -> TraceRow:
    return TraceRow(
        collection=collection,
        sample_id=sample_id,
        benchmark="b",
        task="t",
        split=split,
        setting="query_aware",
        seed=0,
        prompt_digest="p",
        context_tokens=tokens,
        model_digest=f"model of {collection}",
        fragment_id=fragment_id,
        start=0,
        sample_digest="s",
        metadata_digest="m",
    )


ROWS = st.builds(
    trace_row,
    st.sampled_from(["a1", "a2", "b'1"]),
    st.sampled_from([f"s{index}" for index in range(8)]),
    st.sampled_from(["f1", "f2", "f3"]),
    st.sampled_from(["train", "validation"]),
    st.integers(1, 9),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commits=st.lists(st.lists(ROWS, min_size=1, max_size=4), max_size=5))
def test_counts_are_those_of_a_loop(
    tmp_path_factory: pytest.TempPathFactory, commits: Sequence[list[TraceRow]]
) -> None:
    manifest = Manifest(uri=str(tmp_path_factory.mktemp("manifest") / "m.lance"))
    by_key: dict[str, list[TraceRow]] = {}
    for commit in commits:
        manifest.commit(commit)
        for row in commit:
            by_key.setdefault(row.collection, []).append(row)
    assert manifest.keys() == list(by_key)
    assert manifest.keys("a") == [key for key in by_key if key.startswith("a")]
    assert manifest.keys("b'") == [key for key in by_key if key.startswith("b'")]
    expected = {
        key: TraceCollection.of(rows) if len({row.sample_id for row in rows}) == len(rows) else None
        for key, rows in by_key.items()
    }
    assert list(manifest.counts().items()) == list(expected.items())
    for without in ([], ["a1"], ["a1", "b'1"]):
        left = {row.fragment_id for key, rows in by_key.items() if key not in without for row in rows}
        assert manifest.fragment_ids(without=without) == left


def test_samples_are_looked_up_as_of_a_version_too(tmp_path: Path) -> None:
    manifest = Manifest(uri=str(tmp_path / "m.lance"))
    manifest.commit([trace_row("a", "s1", "f1", "train", 3)])
    version = manifest.version()
    manifest.commit([trace_row("a", name, "f2", "train", 3) for name in ("s1", "s2")])
    for names in (["s1", "s2"], [f"s{index}" for index in range(1000)]):  # few are asked for by name, many are not
        assert [row.fragment_id for row in manifest.rows("a", sample_ids=names, version=version)] == ["f1"]
        assert [row.fragment_id for row in manifest.rows("a", sample_ids=names)] == ["f1", "f2", "f2"]


def test_a_sample_with_two_rows_counts_once_and_its_other_fragment_is_garbage(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "store")
    write(store, [trace_sample("a", 10), trace_sample("b", 10)])
    (first, _) = store.rows("c")
    # What a second writer leaves that committed the same sample in the same moment.
    other = tmp_path / "store" / "fragments" / ("0" * 32)
    other.mkdir()
    (other / "part").write_text("")
    (manifest,) = (tmp_path / "store").glob("manifest-*")
    Manifest(uri=str(manifest)).commit([TraceRow(**{**vars(first), "fragment_id": other.name})])
    assert store.collections() == {"c": TraceCollection.of(store.rows("c"))}
    assert (store.collections()["c"].samples, store.collections()["c"].fragments) == (2, 1)
    assert store.gc(min_age_s=0) == [other.name]
    assert store.verify() == []
