"""The trace store in a folder and on a real S3 server: one suite for both."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpolicy.names import COMPRESSIONS
from storage.errors import StorageError
from storage.home import Home
from storage.traces.fragment_content import STORED_DTYPES
from storage.traces.layout import FORMAT_VERSION
from storage.traces.places import Place
from storage.traces.store import TraceStore
from tests.object_store import FaultyProxy, credentials, faulty_proxy
from tests.storage.trace_content import tensors, trace_sample, write

_DTYPES = [getattr(torch, name) for name in STORED_DTYPES]
# Both begin a new store with the same sample; prints what it has committed.
RACING = """
import sys
from storage.traces.store import TraceStore
from tests.storage.trace_content import trace_sample, write

store = TraceStore(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for name in sys.argv[2].split(","):
    print(*write(store, [trace_sample(name, 20)]).committed, flush=True)
"""


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), dtype=st.sampled_from(_DTYPES), compression=st.sampled_from(COMPRESSIONS))
def test_any_mix_of_samples_heads_and_writers_reads_back_bit_for_bit(
    store_url: str, data: st.DataObject, dtype: torch.dtype, compression: str
) -> None:
    url = f"{store_url}/{uuid.uuid4().hex}"
    written = data.draw(st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=4), min_size=1, max_size=3))
    heads, dim, chunk_tokens = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 80)))
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for number, lengths in enumerate(written):
        samples = [trace_sample(f"{number}/{index}", length) for index, length in enumerate(lengths)]
        content = tensors(heads, sum(lengths), dim, dtype, seed=number)
        writer = TraceStore(url, chunk_tokens=chunk_tokens, compression=compression)  # each fragment by its own
        writer.write_fragment(collection="c", model_digest="m", samples=samples, **content)
        spans = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for sample, start, stop in zip(samples, spans, spans[1:], strict=False):
            expected[sample.sample_id] = {name: tensor[:, start:stop] for name, tensor in content.items()}
    store = TraceStore(url)
    rows = store.snapshot("c").rows
    assert [row.sample_id for row in rows] == sorted(expected)
    head = data.draw(st.integers(0, heads - 1))
    scanned = {row.sample_id: trace for row, trace in store.scan(rows, head)}
    for row in rows:
        alone = store.read(row, slice(head, head + 1))
        for name, tensor in expected[row.sample_id].items():
            wanted = tensor[head : head + 1].contiguous().view(torch.uint8)
            for actual in (getattr(alone, name), getattr(scanned[row.sample_id], name)):
                assert (actual.dtype, actual.shape) == (tensor.dtype, tensor[head : head + 1].shape)
                assert actual.contiguous().view(torch.uint8).equal(wanted)
    assert store.verify() == []


def test_nothing_is_there_before_the_first_commit(store_url: str) -> None:
    store = TraceStore(store_url)
    assert (store.rows(), store.collections(), store.version(), store.gc(min_age_s=0)) == ([], {}, 0, [])
    assert (store.verify(), store.compact()) == ([], (0, 0))


def test_a_snapshot_can_be_taken_again_and_does_not_depend_on_the_place(store_url: str, tmp_path: Path) -> None:
    here, there = TraceStore(store_url), TraceStore(tmp_path / "other", compression="zstd")
    for store in (here, there):
        write(store, [trace_sample("a", 10), trace_sample("b", 7)])
    before = here.snapshot("c")
    assert before.digest == there.snapshot("c").digest
    write(here, [trace_sample("z", 8)])
    here.compact()
    assert here.snapshot("c", manifest_version=before.manifest_version) == before
    assert len(here.snapshot("c").rows) == 3


def test_writers_in_processes_of_their_own_commit_each_sample_once(store_url: str) -> None:
    names = [f"s{index}" for index in range(6)]
    orders = (names, names[:2] + names[:1:-1], names[:1] + names[3:] + names[1:3])
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", RACING, store_url, ",".join(order)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for order in orders
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    committed = [name for writer in writers for name in writer.communicate(timeout=120)[0].split()]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert set(committed) == set(names)
    store = TraceStore(store_url)
    assert [row.sample_id for row in store.snapshot("c").rows] == names
    store.gc(min_age_s=0)
    assert store.verify() == []
    expected = tensors(3, 20, 4)["keys"]
    assert all(store.read(row).keys.equal(expected) for row in store.snapshot("c").rows)


def test_damage_is_named_discarded_and_collected_again(store_url: str) -> None:
    store = TraceStore(store_url, chunk_tokens=8)
    samples = [trace_sample("a", 12), trace_sample("b", 30)]
    fragment = write(store, samples)
    before = store.snapshot("c")
    shard = f"fragments/{fragment.fragments[0].fragment_id}/values/c/1/0/0"
    content = bytearray(store.place.read(shard) or b"")
    content[20 * 4 * 2] ^= 4  # in b: its ninth token
    store.place.write(shard, bytes(content))
    (problem,) = store.verify()
    assert (problem.sample_id, problem.head) == ("b", 1)
    with pytest.raises(StorageError, match="sample b, head 1: damaged"):
        store.read(before.rows[1])
    with pytest.raises(StorageError, match="sample b, head 1: damaged"):
        list(store.scan(before.rows, 1))
    store.discard([problem.fragment_id])
    assert store.missing([fragment.fragments[0].fragment_id]) == {fragment.fragments[0].fragment_id}
    assert "not whole" in store.verify()[0].message
    assert write(TraceStore(store_url, chunk_tokens=8), samples).committed == ("a", "b")
    assert (store.verify(), store.snapshot("c").rows) == ([], before.rows)


def test_gc_removes_what_nobody_needs_and_only_when_it_is_old(store_url: str) -> None:
    store = TraceStore(store_url)
    kept = write(store, [trace_sample("a", 10)])
    store.place.write("fragments/halfway/keys/zarr.json", b"{}")
    assert store.gc() == []
    assert store.gc(min_age_s=0) == ["halfway"]
    assert store.place.folders("fragments") == [kept.fragments[0].fragment_id]
    assert store.verify() == []


def test_a_store_of_a_newer_version_is_refused_and_left_alone(store_url: str) -> None:
    store = TraceStore(store_url)
    write(store, [trace_sample("a", 10)])
    marker = json.loads(store.place.read("store.json") or b"")
    store.place.write("store.json", json.dumps({**marker, "format_version": 99}).encode())
    for act in (store.verify, store.gc, lambda: write(store, [trace_sample("b", 10)])):
        with pytest.raises(
            StorageError, match=f"format version 99, expected {FORMAT_VERSION}: use the release that made it"
        ):
            act()
    store.place.write("store.json", b"{")
    with pytest.raises(StorageError, match="is damaged"):
        store.rows()


def test_what_is_left_of_a_store_is_not_taken_for_an_empty_one(store_url: str) -> None:
    store = TraceStore(store_url)
    write(store, [trace_sample("a", 10)])
    marker = store.place.read("store.json") or b""
    name = json.loads(marker)["manifest"]
    acts = (store.verify, store.rows, lambda: store.gc(min_age_s=-1000), lambda: write(store, [trace_sample("b", 10)]))
    for wrong in (["a"], "../../x", "manifest.lance", None):
        store.place.write("store.json", json.dumps({**json.loads(marker), "manifest": wrong}).encode())
        for act in acts:
            with pytest.raises(StorageError, match="which is no manifest"):
                act()
    store.place._objects.delete("store.json")
    for act in acts:
        with pytest.raises(StorageError, match=r"store\.json is missing where fragments lie"):
            act()
    store.place.write("store.json", marker)
    store.place.remove(name, first="")
    for act in acts:
        with pytest.raises(StorageError, match=name):
            act()
    assert len(store.place.folders("fragments")) == 1


def test_two_homes_may_share_one_place(store_url: str, tmp_path: Path) -> None:
    one, two = (Home.open(tmp_path / name, traces=store_url) for name in ("one", "two"))
    write(TraceStore(one.traces), [trace_sample("a", 10)], "first")
    write(TraceStore(two.traces), [trace_sample("a", 12)], "second")
    for home in (one, two):
        store = TraceStore(Home.open(home.path).traces)
        assert store.gc(min_age_s=0) == []
        assert (len(store.snapshot("first").rows), len(store.snapshot("second").rows)) == (1, 1)
        assert store.verify() == []
    with pytest.raises(StorageError, match=r"keeps its traces at .*, not at .*: choose another --home"):
        Home.open(one.path, traces=str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://", "s3:///bucket", "http://host/x"])
def test_a_place_of_another_kind_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="expected a folder or s3://bucket/prefix"):
        Home.open(tmp_path / "home", traces=url)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("url", ["~nobody-of-that-name/traces", "n" * 5000])
def test_a_folder_that_cannot_be_is_one_line(url: str) -> None:
    with pytest.raises(StorageError, match=r"place \S+ cannot be used: "):
        TraceStore(url)


def test_a_place_that_cannot_be_used_binds_no_home(tmp_path: Path, s3_url: str) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (str(tmp_path / "file"), str(tmp_path / "file" / "below"), "s3://no-such-bucket/x"):
        with pytest.raises(StorageError) as refused:
            Home.open(tmp_path / "home", traces=place)
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "home").exists()
    assert Home.open(tmp_path / "home", traces=s3_url).traces == s3_url


@pytest.fixture
def proxy(s3_url: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    del s3_url
    with faulty_proxy(s3_endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


@pytest.mark.slow
def test_an_object_store_that_is_busy_now_and_then_only_takes_longer(s3_url: str, proxy: FaultyProxy) -> None:
    proxy.busy_share = 0.2
    store = TraceStore(s3_url)
    for name in ("a", "b", "c"):
        assert write(store, [trace_sample(name, 10)]).committed == (name,)
    rows = store.snapshot("c").rows
    assert [trace.keys.shape[1] for _, trace in store.scan(rows, 0)] == [10, 10, 10]
    assert store.verify() == []
    assert proxy.refused > 10


def test_an_object_store_that_denies_access_is_one_line_and_loses_nothing(s3_url: str, proxy: FaultyProxy) -> None:
    store = TraceStore(s3_url)
    write(store, [trace_sample("a", 10)])
    before = store.snapshot("c")
    proxy.denies = ("PUT", "POST")
    with pytest.raises(StorageError, match="nothing was committed") as refused:
        write(store, [trace_sample("b", 10)])
    assert "AWS_*" in str(refused.value) and "\n" not in str(refused.value)
    assert TraceStore(s3_url).snapshot("c") == before
    proxy.denies = ("GET", "HEAD")
    with pytest.raises(StorageError, match=r"AWS_\*"):
        TraceStore(s3_url).rows()
    proxy.denies = ()
    assert write(store, [trace_sample("b", 10)]).committed == ("b",)
    assert store.verify() == []


@pytest.mark.parametrize("below", ["head_digests/zarr.json", "head_digests/c/", "values/c/1"])
def test_what_an_object_store_does_not_give_is_not_called_damage(s3_url: str, proxy: FaultyProxy, below: str) -> None:
    write(TraceStore(s3_url), [trace_sample("a", 10)])
    proxy.denies, proxy.denies_below = ("GET", "HEAD"), below
    with pytest.raises(StorageError, match=r"AWS_\*"):
        TraceStore(s3_url).verify()


def test_a_bucket_that_is_not_there_is_one_line(s3_url: str) -> None:
    del s3_url
    store = TraceStore("s3://no-such-bucket/prefix")
    with pytest.raises(StorageError, match=r"s3://no-such-bucket/prefix: .*make the bucket"):
        write(store, [trace_sample("a", 10)])


def test_credentials_are_not_kept(s3_url: str) -> None:
    write(TraceStore(s3_url), [trace_sample("a", 10)])
    secret = credentials("http://unused")["AWS_SECRET_ACCESS_KEY"].encode()
    place = Place.at(s3_url)
    contents = [place.read(entry["path"]) or b"" for entry in place._list("")]
    assert sum(b"fragment_id" in content for content in contents) >= 1  # the manifest's columns: all of it is looked at
    assert not [content for content in contents if secret in content]
