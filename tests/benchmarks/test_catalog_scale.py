"""How quick the catalog and the manifest are with 100,000 runs and 10 million samples, and after thousands of commits.

Only what is right is asserted: answers equal what the generator knows, or a computation of another kind. Seconds are
printed, each beside its limit. Printed by `make bench`; KVP_BENCH_SCALE=0.02 takes seconds and shows only that it runs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from large_home import RUNS_EACH, SAMPLES_EACH, LargeCatalog, Retraining, hex_texts, manifest_blocks

from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.tables.lance_table import Table
from storage.tables.schemas import INDEXED, TABLES
from storage.tables.views import VIEWS
from storage.traces.layout import make_manifest
from storage.traces.manifest import SCHEMA
from storage.traces.places import Place
from storage.traces.store import TraceStore

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

SCALE = float(os.environ.get("KVP_BENCH_SCALE", "1"))
RETRAININGS = round(1500 * SCALE)
COLLECTIONS = round(1667 * SCALE)
SAMPLES = 6_000
COMMITS = round(3_000 * SCALE)
SAMPLE_IDS = [f"ruler/niah_single_1/train/0/{number}/4096" for number in range(SAMPLES)]


@dataclass
class Stopwatch:
    """Prints what took how long, in all and on processors (whatever else runs), and whether it is within its limit."""

    state: str
    late: list[str] = field(default_factory=list)

    def __call__(self, what: str, ask: Callable[..., Any], *args: Any, limit_s: float | None = None) -> Any:
        started, worked = time.perf_counter(), time.process_time()
        answer = ask(*args)
        seconds, worked = time.perf_counter() - started, time.process_time() - worked
        verdict = "" if limit_s is None else f"  limit {limit_s:g} s: {'holds' if seconds < limit_s else 'falls short'}"
        print(f"  {self.state:9} {what:44} {seconds:7.3f} s, {worked:7.3f} of processors{verdict}", flush=True)
        if limit_s is not None and seconds >= limit_s:
            self.late.append(what)
        return answer


@dataclass(frozen=True, kw_only=True)
class LargeHome:
    home: Home
    content: LargeCatalog
    collections: list[str]

    @property
    def old(self) -> Retraining:
        """A retraining from the first third."""
        return self.content.retrainings[len(self.content.retrainings) // 3]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LargeHome]:
    home = Home.open(tmp_path_factory.mktemp("large") / "home")
    content, started = LargeCatalog(), time.perf_counter()
    tables = {
        name: Table(name=name, uri=str(home.catalog / f"{name}.lance"), schema=TABLES[name], indexed=INDEXED[name])
        for name in INDEXED
    }
    tables["models"] = Table(name="models", uri=str(home.catalog / "models.lance"), schema=TABLES["models"])
    for block in (content.shared(), *content.blocks(RETRAININGS)):
        for name, rows in block.items():
            tables[name].append_arrow(rows)
    collections = [key.decode() for key in hex_texts(np.random.default_rng(2), COLLECTIONS, 64)]
    manifest = make_manifest(Place.at(home.traces))._table
    for rows in manifest_blocks(SCHEMA, collections, samples=SAMPLES, each=20):
        manifest.append_arrow(rows)
    size = f"{RETRAININGS * RUNS_EACH:,} runs, {COLLECTIONS * SAMPLES:,} samples, {size_mb(home.path):,.0f} MB"
    print(f"\n{size}, written in {time.perf_counter() - started:.0f} s")
    yield LargeHome(home=home, content=content, collections=collections)
    shutil.rmtree(home.path)  # gigabytes, and pytest keeps the folders of its last runs


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


@pytest.fixture(scope="module", params=["bulk", "compacted"])
def watch(request: pytest.FixtureRequest, large: LargeHome) -> Iterator[Stopwatch]:
    """All questions first as it was written in bulk, then when all files are merged and all rows indexed."""
    if request.param == "compacted":
        started = time.perf_counter()
        Catalog(large.home).compact()
        TraceStore(large.home.traces).compact()
        size = f"{size_mb(large.home.path):,.0f} MB of all versions"
        print(f"\n  compacted in {time.perf_counter() - started:.0f} s; {size}")
    watch = Stopwatch(request.param)
    print()
    yield watch
    print(f"\n  {watch.state}: {'every limit holds' if not watch.late else 'falls short: ' + ', '.join(watch.late)}")


def test_lineage_of_a_curve_and_of_what_it_rests_on(large: LargeHome, watch: Stopwatch) -> None:
    catalog, old = Catalog(large.home), large.old
    curve, snapshot = old.artifacts["curve"][3], old.artifacts["trace_snapshot"][0]
    for what, name in {"of a curve": curve, "of a curve, by 12 digits": curve[: len("curve-") + 12]}.items():
        graph = watch(f"lineage {what}", catalog.lineage, name, limit_s=1)
        assert set(graph.nodes) == old.curve_came_from | {curve}
    graph = watch("lineage down from a snapshot", catalog.lineage, snapshot, "down", limit_s=1)
    stages = ("train-heads", "train", "evaluate-shard", "evaluate", "failed")
    kinds = ("head_group", "policy_set", "evaluation_shard", "evaluation", "curve")
    below = {name for stage in stages for name in old.runs[stage]}
    assert set(graph.nodes) == below.union({snapshot}, *(old.artifacts[kind] for kind in kinds))
    own = [other for other in large.content.retrainings if other.model_id == old.model_id]
    graph = watch(f"lineage down from a model, {len(own)} retrainings", catalog.lineage, old.model_id, "down")
    found = {name for name, node in graph.nodes.items() if node.name != "recorded"}
    assert found == {old.model_id}.union(*(other.went_from_model for other in own))


def test_single_look_ups_and_the_record_of_a_run(large: LargeHome, watch: Stopwatch) -> None:
    catalog, old = Catalog(large.home), large.old
    train, evaluate = old.runs["train"][0], old.runs["evaluate"][0]
    (run,) = watch("rows: a run", catalog.rows, "runs", f"run_id = '{train}'", limit_s=0.1)
    found = watch("find_completed", catalog.find_completed, run["stage_key"], limit_s=0.1)
    assert (found.run_id, found.outputs) == (train, {"policy_set": old.artifacts["policy_set"][0]})
    assert watch("find_completed of nothing", catalog.find_completed, "none", limit_s=0.1) is None
    curves = watch("rows: curves of an evaluation", catalog.rows, "curves", f"run_id = '{evaluate}'", limit_s=1)
    assert {row["curve_id"] for row in curves} == set(old.artifacts["curve"])
    record_run(catalog, old.model_id)  # the first one of a process also looks at its surroundings
    watch("record a run", record_run, catalog, old.model_id, limit_s=1)


def record_run(catalog: Catalog, model_id: str) -> None:
    arguments: dict[str, Any] = {"stage_key": "k" * 64, "parameters": {}, "code_fingerprint": "f" * 64}
    with catalog.record_run(stage="recorded", inputs={"model": model_id}, **arguments):
        pass


def test_ready_made_views(large: LargeHome, watch: Stopwatch) -> None:
    catalog, old = Catalog(large.home), large.old
    answers = {name: watch(f"FROM {name}", catalog.sql, f"FROM {name}", limit_s=2) for name in VIEWS}
    newest = {other.model_id: other for other in large.content.retrainings}.values()
    curves = {name for other in newest for name in other.artifacts["curve"]}
    assert set(answers["latest_curves"]["curve_id"].to_pylist()) == curves
    assert set(answers["worst_heads"]["run_id"].to_pylist()) == {other.runs["train"][0] for other in newest}
    costs = answers["worst_heads"]["heldout_cost"].to_pylist()
    assert costs == sorted(costs, reverse=True)
    assert sum(answers["run_costs"]["runs"].to_pylist()) == len(catalog.rows("runs", columns=["run_id"]))
    for macro, root, direction in (
        ("lineage_up", old.artifacts["curve"][0], "up"),
        ("lineage_down", old.model_id, "down"),
    ):
        reached = watch(f"FROM {macro}('{root[:6]}...')", catalog.sql, f"FROM {macro}('{root}')", limit_s=2)
        nodes = catalog.lineage(root, direction).nodes
        assert set(reached["artifact_id"].to_pylist()) == {name for name in nodes if not name.startswith("run-")}


def test_samples_in_sql(large: LargeHome, watch: Stopwatch) -> None:
    catalog, run = Catalog(large.home), large.old.runs["collect-fragment"][4]
    one = watch("samples of one run", catalog.sql, f"FROM samples WHERE run_id = '{run}'", limit_s=2)
    assert one.num_rows == len(catalog.rows("samples", f"run_id = '{run}'")) > 0
    query = "SELECT split, count(*) AS n FROM samples GROUP BY split"
    (every,) = watch("all samples by split", catalog.sql, query, limit_s=2).to_pylist()
    assert every["n"] == SAMPLES_EACH * RETRAININGS


def test_the_manifest(large: LargeHome, watch: Stopwatch) -> None:
    store, key = TraceStore(large.home.traces), large.collections[len(large.collections) // 2]
    wanted = SAMPLE_IDS[32:48]
    rows = watch("look 16 samples up", lambda: store.rows(key, sample_ids=wanted), limit_s=0.5)
    assert [row.sample_id for row in rows] == wanted
    snapshot = watch("snapshot of 6,000 samples", store.snapshot, key, limit_s=2)
    assert [row.sample_id for row in snapshot.rows] == sorted(SAMPLE_IDS)
    assert watch("a collection, by 8 characters", store.collection, key[:8], limit_s=2) == store.rows(key)
    listed = watch("every collection counted (kvp traces list)", store.collections)
    assert list(listed) == large.collections
    assert {(one.samples, one.fragments, one.tokens) for one in listed.values()} == {(SAMPLES, 375, SAMPLES * 4096)}


@pytest.mark.parametrize("by_itself", [False, True], ids=["never merged", "merged by appending"])
def test_thousands_of_small_commits(tmp_path: Path, by_itself: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not by_itself:
        monkeypatch.setattr("storage.tables.lance_table._FILES_AT_MOST", COMMITS + 1)
    table = Table(name="runs", uri=str(tmp_path / "runs.lance"), schema=TABLES["runs"], indexed=INDEXED["runs"])
    (block,) = LargeCatalog(samples_each=1).blocks(-(-COMMITS // RUNS_EACH), each=COMMITS)
    content = block["runs"].slice(0, COMMITS)
    names = content["run_id"].to_pylist()
    print("\n  merged by appending" if by_itself else "\n  never merged")
    appending, steps = 0.0, {round(COMMITS * part) for part in (0.03, 0.1, 0.3, 1)}
    for number in range(COMMITS):
        started = time.perf_counter()
        table.append_arrow(content.slice(number, 1))
        appending += time.perf_counter() - started
        if number + 1 in steps:
            watch = Stopwatch(f"{number + 1}")
            print(f"  {number + 1} commits, {num_files(table)} files, {size_mb(tmp_path):.0f} MB", end="; ")
            print(f"an append took {appending / (number + 1):.4f} s on average")
            found = watch("look a run up", table.scan, f"run_id = '{names[number // 2]}'", ["run_id"])
            assert found["run_id"].to_pylist() == [names[number // 2]]
            assert watch("the version at a time", table.version_at, committed_at(table, 3)) == 3
    assert table.scan(columns=["run_id"])["run_id"].to_pylist() == names
    assert table.scan(version=3).num_rows <= 2


def num_files(table: Table) -> int:
    dataset = table.dataset()
    assert dataset is not None
    return len(dataset.get_fragments())


def committed_at(table: Table, version: int) -> Any:
    dataset = table.dataset(version)
    assert dataset is not None
    return dataset.get_version()["timestamp"].astimezone()
