"""Collecting that is killed again and again, at random moments: nothing committed is lost, doubled or torn."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from kvpolicy.training.collection import CollectConfig
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.traces.store import TraceStore
from tasks.collect import collection_stage
from tasks.framework.references import ModelRef, PromptsRef
from tests.tasks.trace_writers import collect_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CONFIG = CollectConfig(num_train_samples=4, num_heldout_samples=1, samples_per_fragment=1)
KILLS = 100


@dataclass(kw_only=True)
class Collection:
    """A collection that processes work on, each beginning elsewhere."""

    home: Home
    model: ModelRef
    prompts: PromptsRef
    key: str
    writers: list[BaseProcess] = field(default_factory=list)

    def start(self, first: int) -> BaseProcess:
        # Forked from a server that has everything imported: a writer works as soon as it is started.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.tasks.trace_writers"])
        arguments = (self.home.path, self.model, self.prompts, CONFIG, self.key)
        writer = context.Process(target=collect_all, args=arguments, kwargs={"first": first})
        writer.start()
        return writer

    def check(self, committed: set[str]) -> set[str]:
        """Whether everything that was committed is there once, and whole; returns what is committed by now."""
        store = TraceStore(self.home.traces)
        ids = [row.sample_id for row in store.rows(self.key)]
        assert len(ids) == len(set(ids))
        assert committed <= set(ids)
        assert store.verify() == []
        return set(ids)

    def digest(self) -> str:
        return TraceStore(self.home.traces).snapshot(self.key).digest


@pytest.fixture
def new_collection(
    home: Home, model: ModelRef, prompts: Callable[..., PromptsRef], tmp_path: Path
) -> Callable[[], Collection]:
    """A collection that has not begun, in a home of its own."""
    train = prompts("train", CONFIG.num_train_samples)
    stage = collection_stage(model, (train, prompts("validation")), CONFIG)
    empty = tmp_path / "empty"
    shutil.copytree(home.path, empty)

    def make() -> Collection:
        place = tmp_path / f"home-{time.monotonic_ns()}"
        shutil.copytree(empty, place)
        return Collection(home=Home.open(place), model=model, prompts=train, key=stage.key)

    return make


@pytest.mark.parametrize("num_writers", [1, 3])
def test_kills_at_random_moments_change_nothing(new_collection: Callable[[], Collection], num_writers: int) -> None:
    for _ in range(2):  # the first also waits for the server that writers are forked from
        undisturbed = new_collection()
        started = time.monotonic()
        writer = undisturbed.start(0)
        writer.join()
        assert writer.exitcode == 0
        whole_s, expected = time.monotonic() - started, undisturbed.digest()

    draws, kills, rounds = random.Random(num_writers), 0, 0
    while kills < KILLS:
        rounds += 1
        collection = new_collection()
        committed: set[str] = set()
        running = {first: collection.start(first) for first in range(num_writers)}
        while running:
            first = draws.choice(sorted(running))
            time.sleep(draws.uniform(0, whole_s / 2))
            victim = running[first]
            if victim.is_alive() and kills < KILLS:
                os.kill(victim.pid or 0, signal.SIGKILL)
            victim.join()
            committed = collection.check(committed)
            if victim.exitcode == -signal.SIGKILL:
                kills += 1
                running[first] = collection.start(first)
            else:
                assert victim.exitcode == 0
                del running[first]
        assert len(committed) == collection.prompts.num_samples
        assert collection.digest() == expected
        rows = Catalog(collection.home).rows("samples", f"collection = '{collection.key}'")
        assert sorted(row["sample_id"] for row in rows) == sorted(committed)
        TraceStore(collection.home.traces).gc(min_age_s=0)
        assert collection.check(committed) == committed
        shutil.rmtree(collection.home.path)
    # What was done, for `make test-slow` with -s.
    print(f"{kills} kills of {num_writers} writer(s) in {rounds} collections, {whole_s:.1f} s each when undisturbed")
