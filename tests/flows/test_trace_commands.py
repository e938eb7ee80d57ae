"""The `kvp traces` commands on a home of a real run."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.tables.schemas import TABLES
from storage.traces.store import TraceStore


@pytest.fixture
def home(small_run, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(small_run.home, tmp_path / "home")


def test_collections_and_samples_are_listed(kvp_here, home):
    (collection,) = json.loads(kvp_here("traces", "list", "--json", home=home).stdout)
    samples = json.loads(
        kvp_here("traces", "show", "--collection", collection["collection"][:8], "--json", home=home).stdout
    )
    assert collection["samples"] == len(samples) == 5
    assert collection["tokens"] == sum(sample["context_tokens"] for sample in samples)
    assert collection["fragments"] == len({sample["fragment_id"] for sample in samples})


def test_damage_ends_with_1_is_named_discarded_and_mended_by_the_next_run(kvp_here, small_run, home):
    whole = kvp_here("traces", "verify", home=home)
    assert (whole.code, whole.stdout) == (0, "5 samples are whole\n")
    shard = next(path for path in (home / "traces").rglob("values/c/1/0/0"))
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.write_bytes(content)
    damaged = kvp_here("traces", "verify", "--json", home=home)
    assert damaged.code == 1
    assert {problem["head"] for problem in json.loads(damaged.stdout)} == {1}
    assert kvp_here("traces", "verify", "--discard", home=home).code == 1
    mended = kvp_here("collect", *small_run.options, home=home)
    assert mended.code == 0, mended.stderr
    assert kvp_here("traces", "verify", home=home).code == 0
    assert small_run.document["trace_snapshot"]["id"] in mended.stdout
    assert "was there already" in kvp_here("train", *small_run.options, home=home).stdout


def test_heads_are_exported_as_they_are_stored(kvp_here, home, tmp_path):
    for name in ("traces.parquet", "traces.safetensors"):
        done = kvp_here(
            "traces", "export", "--out", str(tmp_path / name), "--heads", "3,0-1", "--split", "train", home=home
        )
        assert done.code == 0, done.stderr
    store = TraceStore(home / "traces")
    rows = [row for row in store.collection() if row.split == "train"]
    tensors = load_file(tmp_path / "traces.safetensors")
    table = pq.read_table(tmp_path / "traces.parquet").to_pandas()
    assert len(tensors) == 4 * len(rows) == 16
    assert len(table) == 3 * sum(row.context_tokens for row in rows)
    for row in rows:
        trace = store.read(row)
        for name in ("keys", "values", "importance"):
            assert tensors[f"{row.sample_id}/{name}"].equal(getattr(trace, name)[[3, 0, 1]])
        own = table[(table["sample_id"] == row.sample_id) & (table["head"] == 3)].sort_values("position")
        assert torch.tensor(own["importance"].to_numpy()).equal(trace.importance[3])
        assert torch.tensor([list(key) for key in own["key"]]).equal(trace.keys[3].float())


def test_what_is_asked_wrongly_is_one_line_and_leaves_no_file(kvp_here, home, tmp_path):
    wrong = {
        ("--heads", "9", "--out", str(tmp_path / "a.parquet")): "expected at least one of 0 to 5",
        ("--heads", "one", "--out", str(tmp_path / "a.parquet")): "expected numbers and ranges",
        ("--out", str(tmp_path / "a.csv")): "ends with .parquet or .safetensors",
        ("--split", "none", "--out", str(tmp_path / "a.safetensors")): "0 samples",
        ("--collection", "xyz", "--out", str(tmp_path / "a.parquet")): "0 collections",
        ("--out", str(tmp_path / "missing" / "a.parquet")): "choose another --out",
    }
    for arguments, message in wrong.items():
        said = kvp_here("traces", "export", *arguments, home=home)
        assert said.code != 0
        assert message in said.stderr
        assert said.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"home"}


def test_garbage_goes(kvp_here, home):
    fragments = home / "traces" / "fragments"
    kept = {path.name for path in fragments.iterdir()}
    shutil.copytree(next(fragments.iterdir()), fragments / "left-behind")
    assert kvp_here("traces", "gc", home=home).stdout == "0 fragments removed\n"
    assert json.loads(kvp_here("traces", "gc", "--min-age-hours", "0", "--json", home=home).stdout) == ["left-behind"]
    assert {path.name for path in fragments.iterdir()} == kept


def test_compacting_leaves_one_file_a_table_and_everything_as_it_was(kvp_here, home):
    store, catalog = TraceStore(home / "traces"), Catalog(Home.open(home))
    before = store.collection(), {name: catalog.rows(name) for name in TABLES}
    version = catalog.version()
    (manifest, *rows) = reversed(json.loads(kvp_here("compact", "--json", home=home).stdout))
    assert manifest == {"table": "manifest", "files_before": 2, "files": 1}
    assert {row["table"] for row in rows} == set(TABLES)
    assert all(row["files"] <= 1 for row in rows) and any(row["files_before"] > 1 for row in rows)
    assert (store.collection(), {name: catalog.rows(name) for name in TABLES}) == before
    count = "SELECT count(*) AS runs FROM runs"
    assert catalog.sql(count, at=version).to_pylist() == catalog.sql(count).to_pylist()
    assert "files_before" in kvp_here("compact", home=home).stdout
