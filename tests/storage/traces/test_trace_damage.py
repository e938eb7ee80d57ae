"""What a disk can do to a trace store: flipped bits, no room, lost fragments, a clock that jumps."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpolicy.names import COMPRESSIONS
from storage.errors import StorageError
from storage.traces.store import TraceRow, TraceStore
from tests.storage.trace_content import trace_sample, write

FLIPS = 1000
HEADS, CHUNK_TOKENS = 3, 16
# A disk of 3 MB: a first fragment fits, a second does not, and after a removal it does.
FULL_DISK = """
import sys
from pathlib import Path
from storage.errors import StorageError
from storage.traces.store import TraceStore
from tests.storage.trace_content import trace_sample, write

disk = Path(sys.argv[1])
store = TraceStore(disk / "store")
write(store, [trace_sample("a", 100)])
before = store.snapshot("c")
filler = disk / "filler"
filler.write_bytes(bytes(1_500_000))
try:
    write(store, [trace_sample("b", 40_000)], heads=3)
except StorageError as error:
    print(error)
assert store.snapshot("c") == before and store.verify() == []
filler.unlink()
assert write(store, [trace_sample("b", 40_000)], heads=3).committed == ("b",)
assert store.verify() == []
print("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_flipped_byte_is_found_and_named(tmp_path: Path, compression: str) -> None:
    store = TraceStore(tmp_path, chunk_tokens=CHUNK_TOKENS, compression=compression)
    write(store, [trace_sample(f"s{index}", length) for index, length in enumerate((30, 21, 40))], heads=HEADS)
    rows = store.snapshot("c").rows
    folder = tmp_path / "fragments" / rows[0].fragment_id
    files = [path for path in folder.rglob("*") if path.is_file()]
    draws = random.Random(compression)
    for path in draws.choices(files, [path.stat().st_size for path in files], k=FLIPS // len(COMPRESSIONS) + 1):
        intact = path.read_bytes()
        place = draws.randrange(len(intact))
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1 << draws.randrange(8)]) + intact[place + 1 :])
        named = {(problem.sample_id, problem.head) for problem in store.verify()}
        path.write_bytes(intact)
        assert named, (path, place)
        must, may = _hit(path.relative_to(folder), place, len(intact), rows, compression)
        assert must <= named <= may, (path, place, named)
    assert store.verify() == []


def _hit(
    path: Path, place: int, size: int, rows: tuple[TraceRow, ...], compression: str
) -> tuple[set[tuple[str, int | None]], set[tuple[str, int | None]]]:
    """(sample, head) that a damaged byte belongs to, and those that may be named with it: all of a shard."""
    ids = {row.sample_id for row in rows}
    if path.name == "zarr.json":
        everything = {(name, None) for name in ids}
        return everything, everything
    if path.parts[0] == "head_digests":
        sample, head = divmod(place // 32, HEADS)
        return {(rows[sample].sample_id, head)}, {(rows[sample].sample_id, head)}
    head = int(path.parts[2])
    if compression != "none":
        return set(), {(name, head) for name in ids}
    token = place // (size // rows[-1].stop)
    hit = {(row.sample_id, head) for row in rows if row.start <= token < row.stop}
    return hit, hit


def test_a_full_disk_is_one_line_and_the_next_try_goes_on(tmp_path: Path) -> None:
    # A file system of its own, in a namespace of its own, that ends with the process.
    mount = f'mount -t tmpfs -o size=3m tmpfs {tmp_path} && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", FULL_DISK]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False, cwd=Path.cwd()
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"this system lets nobody mount a small disk: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    error, after = done.stdout.splitlines()
    assert "No space left" in error and "nothing was committed" in error and "make room" in error
    assert after == "went on"


def test_a_manifest_that_names_a_lost_fragment_says_which(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    lost = write(store, [trace_sample("a", 10)])
    write(store, [trace_sample("b", 10)])
    shutil.rmtree(tmp_path / "fragments" / lost.fragments[0].fragment_id)
    a, b = store.snapshot("c").rows
    with pytest.raises(StorageError, match=rf"{lost.fragments[0].fragment_id} cannot be opened.*collect it again"):
        TraceStore(tmp_path).read(a)
    assert TraceStore(tmp_path).read(b).keys.shape[1] == 10
    assert [problem.sample_id for problem in store.verify()] == ["a"]


def test_half_an_object_whose_writer_was_killed_goes_with_its_fragment(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    kept = write(store, [trace_sample("a", 10)])
    half = tmp_path / "fragments" / "halfway" / "keys" / "c" / "0" / "0" / "0#1"  # what obstore writes before "0"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    assert store.gc() == []
    assert store.gc(min_age_s=0) == ["halfway"]
    assert [path.name for path in (tmp_path / "fragments").iterdir()] == [kept.fragments[0].fragment_id]


def test_a_clock_that_jumps_back_makes_nothing_old(tmp_path: Path) -> None:
    store = TraceStore(tmp_path)
    write(store, [trace_sample("a", 10)])
    live = tmp_path / "fragments" / "about-to-be-committed" / "keys"
    live.mkdir(parents=True)
    (live / "zarr.json").write_text("{}")
    ahead = time.time() + 86_400  # it was written before the clock jumped back a day
    os.utime(live / "zarr.json", (ahead, ahead))
    assert store.gc(min_age_s=0) == []
    assert store.gc(min_age_s=-200_000) == ["about-to-be-committed"]
