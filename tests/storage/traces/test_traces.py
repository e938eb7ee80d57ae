from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import StorageError
from storage.traces.layout import find_manifest
from storage.traces.store import TraceStore
from tests.storage.trace_content import DTYPES, tensors, trace_sample, write


@settings(deadline=None, max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_whatever_is_written_is_read_bit_for_bit(data: st.DataObject, dtype: torch.dtype) -> None:
    fragments = data.draw(st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=4), min_size=1, max_size=3))
    heads, dim, chunk_tokens = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 80)))
    root = Path(tempfile.mkdtemp())
    try:
        expected: dict[str, dict[str, torch.Tensor]] = {}
        for number, lengths in enumerate(fragments):
            samples = [trace_sample(f"{number}/{index}", length) for index, length in enumerate(lengths)]
            content = tensors(heads, sum(lengths), dim, dtype, seed=number)
            content["keys"][0, 0, 0] = float("-inf")
            writer = TraceStore(root, chunk_tokens=chunk_tokens)  # each fragment by its own writer
            writer.write_fragment(collection="c", model_digest="m", samples=samples, **content)
            start = 0
            for sample in samples:
                stop = start + sample.context_tokens
                expected[sample.sample_id] = {name: tensor[:, start:stop] for name, tensor in content.items()}
                start = stop
        store = TraceStore(root)
        snapshot = store.snapshot("c")
        assert [row.sample_id for row in snapshot.rows] == sorted(expected)
        first = data.draw(st.integers(0, heads - 1))
        chosen = slice(first, data.draw(st.integers(first + 1, heads)))
        for row in snapshot.rows:
            read = store.read(row, chosen)
            for name, tensor in expected[row.sample_id].items():
                actual = getattr(read, name)
                assert actual.dtype == tensor.dtype
                assert actual.shape == tensor[chosen].shape
                assert actual.contiguous().view(torch.uint8).equal(tensor[chosen].contiguous().view(torch.uint8))
            assert read.positions.tolist() == list(range(row.context_tokens))
        assert store.verify() == []
    finally:
        shutil.rmtree(root)


def test_zeros_are_stored_like_anything_else(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    content = {name: torch.zeros_like(tensor) for name, tensor in tensors(2, 10, 4).items()}
    store.write_fragment(collection="c", model_digest="m", samples=[trace_sample("s", 10)], **content)
    (row,) = store.snapshot("c").rows
    assert not store.read(row).keys.any()
    shutil.rmtree(tmp_path / "fragments" / row.fragment_id / "keys" / "c" / "1")
    for read in (lambda: store.read(row), lambda: list(store.scan([row], 1))):
        with pytest.raises(StorageError, match="head 1: damaged"):  # not zeros again
            read()
    assert [problem.head for problem in store.verify()] == [1]


def test_a_head_of_nothing_but_nan_is_refused(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    for dtype in DTYPES:
        content = tensors(2, 10, 4, dtype)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        content["keys"].view(bits)[1] = -1 if dtype == torch.bfloat16 else torch.tensor(torch.nan).to(dtype).view(bits)
        with pytest.raises(StorageError, match="keys of head 1 are NaN throughout"):
            store.write_fragment(collection="c", model_digest="m", samples=[trace_sample("s", 10)], **content)
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_what_it_holds_not_when_or_where_it_was_written(tmp_path: Path) -> None:
    samples = [trace_sample("b", 20), trace_sample("a", 30)]
    content = tensors(3, 50, 4)
    one, two = TraceStore(tmp_path / "one"), TraceStore(tmp_path / "two", chunk_tokens=7)
    one.write_fragment(collection="first", model_digest="m", samples=samples, **content)
    for sample, span in ((samples[1], slice(20, 50)), (samples[0], slice(0, 20))):  # other order, other fragments
        cut = {name: tensor[:, span] for name, tensor in content.items()}
        two.write_fragment(collection="second", model_digest="m", samples=[sample], **cut)
    assert one.snapshot("first").digest == two.snapshot("second").digest
    content["keys"][2, 49, 3] += 1
    three = TraceStore(tmp_path / "three")
    three.write_fragment(collection="first", model_digest="m", samples=samples, **content)
    assert three.snapshot("first").digest != one.snapshot("first").digest


def test_a_snapshot_can_be_taken_again_after_more_was_committed(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    write(store, [trace_sample("a", 10), trace_sample("t", 10, split="test")])
    before = store.snapshot("c")
    write(store, [trace_sample("b", 10)])
    write(store, [trace_sample("x", 10)], "other")
    assert len(store.snapshot("c").rows) == 3
    assert store.snapshot("c", manifest_version=before.manifest_version) == before
    assert {row.sample_id for row in store.rows("c")} == {"a", "b", "t"}
    assert before.num_tokens == 20


def test_a_sample_is_committed_once(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    first = write(store, [trace_sample("a", 10), trace_sample("b", 20)])
    assert first.committed == ("a", "b")
    again = write(store, [trace_sample("a", 10), trace_sample("b", 20)])
    assert (again.committed, again.fragments) == ((), first.fragments)
    assert len(list((tmp_path / "fragments").iterdir())) == 1
    mixed = write(store, [trace_sample("b", 20), trace_sample("c", 5)], seed=3)
    assert mixed.committed == ("c",)
    assert [(part.num_samples, part.num_tokens) for part in mixed.fragments] == [(1, 20), (1, 5)]
    assert mixed.fragments[0].fragment_id == first.fragments[0].fragment_id
    rows = {row.sample_id: row for row in store.snapshot("c").rows}
    assert rows["b"].fragment_id == first.fragments[0].fragment_id
    assert store.read(rows["c"]).keys.equal(tensors(3, 25, 4, seed=3)["keys"][:, 20:])
    assert write(store, [trace_sample("a", 10)], "other").committed == ("a",)


def test_of_two_committed_rows_the_first_counts_at_every_version(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    write(store, [trace_sample("a", 10)])
    before = store.snapshot("c")
    write(store, [trace_sample("a", 10)], "elsewhere", seed=1)
    # What a writer that lost the race between its look and its commit leaves behind.
    (loser,) = store.snapshot("elsewhere").rows
    manifest = find_manifest(store.place)
    assert manifest is not None
    manifest.commit([type(loser)(**{**vars(loser), "collection": "c"})])
    assert store.snapshot("c").rows == before.rows
    assert store.gc(min_age_s=0) == []  # its own collection still needs the fragment


def test_gc_removes_what_nobody_needs_and_only_that(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    assert store.gc() == []
    kept = write(store, [trace_sample("a", 10)])
    for garbage in (".tmp-1", "uncommitted"):
        shutil.copytree(tmp_path / "fragments" / kept.fragments[0].fragment_id, tmp_path / "fragments" / garbage)
    assert store.gc() == []  # young enough to belong to a live writer
    assert store.gc(min_age_s=0) == [".tmp-1", "uncommitted"]
    assert store.read(store.snapshot("c").rows[0]).keys.shape == (3, 10, 4)


@pytest.mark.parametrize("name", ["keys", "values", "importance", "head_digests"])
def test_a_flipped_byte_is_found_and_named(tmp_path: Path, name: str) -> None:
    store = TraceStore(tmp_path, chunk_tokens=16)
    lengths = [30, 21, 40]
    samples = [trace_sample(f"s{index}", length) for index, length in enumerate(lengths)]
    write(store, samples)
    rows = store.snapshot("c").rows
    folder = tmp_path / "fragments" / rows[0].fragment_id
    shards = [path for path in (folder / name / "c").rglob("*") if path.is_file()]
    generator = torch.Generator().manual_seed(1)
    for shard in shards:
        intact = shard.read_bytes()
        for position in torch.randint(len(intact), (6,), generator=generator).tolist():
            damaged = bytearray(intact)
            damaged[position] ^= 1 << (position % 8)
            shard.write_bytes(damaged)
            problems = store.verify()
            assert problems
            if name == "head_digests":
                sample, head = divmod(position // 32, 3)
                assert {(problem.sample_id, problem.head) for problem in problems} == {(f"s{sample}", head)}
            else:
                assert {problem.head for problem in problems} == {int(shard.relative_to(folder / name / "c").parts[0])}
            for row in rows:
                if row.sample_id not in {problem.sample_id for problem in problems}:
                    TraceStore(tmp_path).read(row)
        shard.write_bytes(intact)
    assert store.verify() == []


def test_damage_of_one_sample_is_named_and_never_read(tmp_path: Path) -> None:
    store = TraceStore(tmp_path, chunk_tokens=10)
    write(store, [trace_sample("a", 30), trace_sample("b", 30)])
    a, b = store.snapshot("c").rows
    shard = tmp_path / "fragments" / a.fragment_id / "values" / "c" / "2" / "0" / "0"
    content = bytearray(shard.read_bytes())
    content[(10 * 4 * 2 + 4) * 4 + 3] ^= 8  # in the fifth chunk of 10 tokens x 4 x 2 bytes and its checksum
    shard.write_bytes(content)
    (problem,) = store.verify()
    assert (problem.sample_id, problem.head) == ("b", 2)
    assert str(problem).startswith(f"fragment {a.fragment_id}, sample b, head 2: ")
    assert "\n" not in str(problem)
    store.read(a)
    store.read(b, slice(0, 2))
    with pytest.raises(StorageError, match="sample b, head 2: damaged"):
        store.read(b)


def test_what_was_discarded_and_is_collected_again_is_the_same_snapshot(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    samples = [trace_sample("a", 10), trace_sample("b", 10)]
    damaged = write(store, samples)
    write(store, [trace_sample("z", 8)])
    before = store.snapshot("c")
    for path in (tmp_path / "fragments" / damaged.fragments[0].fragment_id / "keys" / "c").rglob("0"):
        if path.is_file():
            path.write_bytes(b"nothing")
    problems = store.verify()
    assert {problem.sample_id for problem in problems} == {"a", "b"}
    store.discard(problem.fragment_id for problem in problems)
    assert [path.name for path in (tmp_path / "fragments").iterdir()] != [damaged.fragments[0].fragment_id]
    again = write(TraceStore(tmp_path), samples)
    assert (again.fragments[0].fragment_id, again.committed) == (damaged.fragments[0].fragment_id, ("a", "b"))
    assert (store.verify(), store.snapshot("c").digest, store.snapshot("c").rows) == ([], before.digest, before.rows)
    store.discard(["never was there"])


def test_where_a_fragment_is_gone_other_bits_of_the_sample_take_its_place(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    lost = write(store, [trace_sample("a", 10)])
    write(store, [trace_sample("b", 10)])
    shutil.rmtree(tmp_path / "fragments" / lost.fragments[0].fragment_id)
    again = write(TraceStore(tmp_path), [trace_sample("a", 10)], seed=1)  # another machine's last bits
    assert again.committed == ("a",)
    assert again.fragments[0].fragment_id != lost.fragments[0].fragment_id
    rows = {row.sample_id: row for row in store.snapshot("c").rows}
    assert rows["a"].fragment_id == again.fragments[0].fragment_id
    assert store.read(rows["a"]).keys.equal(tensors(3, 10, 4, seed=1)["keys"])
    assert store.verify() == []


def test_changed_metadata_and_missing_fragments_are_found(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    write(store, [trace_sample("a", 10), trace_sample("b", 10)])
    folder = tmp_path / "fragments" / store.snapshot("c").rows[0].fragment_id
    document = folder / "zarr.json"
    document.write_text(document.read_text().replace('"start": 10', '"start": 11'))
    assert [(problem.sample_id, problem.head) for problem in store.verify()] == [("a", None), ("b", None)]
    shutil.rmtree(folder)
    assert "not whole" in store.verify()[0].message
    with pytest.raises(StorageError, match="cannot be opened"):
        TraceStore(tmp_path).read(store.snapshot("c").rows[0])


def test_bad_writes_commit_nothing(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "store")
    good = tensors(2, 10, 4)
    bad = {
        "expected at least one": ([], good),
        "occurs twice": ([trace_sample("a", 5), trace_sample("a", 5)], good),
        "9 context tokens": ([trace_sample("a", 9)], good),
        "expected both in one of": ([trace_sample("a", 10)], {**good, "values": good["values"].double()}),
        r"\(head, token, dim\) twice": ([trace_sample("a", 10)], {**good, "importance": good["importance"][:1]}),
        "finite": ([trace_sample("a", 10)], {**good, "importance": good["importance"] / 0}),
    }
    for message, (samples, content) in bad.items():
        with pytest.raises(StorageError, match=message):
            store.write_fragment(collection="c", model_digest="m", samples=samples, **content)
    assert not (tmp_path / "store").exists()
    with pytest.raises(StorageError, match="no traces for collection c"):
        store.snapshot("c")


def test_a_store_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "fragments").write_text("in the way")
    with pytest.raises(StorageError, match=r"fragments/.*: Not a directory"):
        write(TraceStore(tmp_path), [trace_sample("a", 10)])
    assert TraceStore(tmp_path).rows("c") == []


def test_heads_must_be_a_range(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    write(store, [trace_sample("a", 10)])
    (row,) = store.snapshot("c").rows
    for heads in (slice(2, 2), slice(0, 3, 2), slice(5, 9)):
        with pytest.raises(StorageError, match="consecutive order"):
            store.read(row, heads)
