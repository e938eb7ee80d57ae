"""The trace store: keys, values and importance of every KV head, for terabytes of samples.

A fragment (`storage.traces.fragments`) is written whole and then committed by one append to the manifest
(`storage.traces.manifest`). Until that append it does not exist for readers, so a writer that dies leaves only garbage,
which `TraceStore.gc` removes.

Fragments are named by their content. So what was lost or discarded and is collected again comes to lie where the
manifest says that it is, and every snapshot that needs it is whole again.
"""

from __future__ import annotations

import datetime as dt
import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.names import COMPRESSIONS
from storage.errors import StorageError
from storage.traces import fragments
from storage.traces.fragment_draft import FragmentDraft
from storage.traces.fragments import Fragment
from storage.traces.layout import FRAGMENTS, find_manifest, make_manifest
from storage.traces.manifest import TraceCollection, TraceRow, TraceSample, TraceSnapshot
from storage.traces.places import Place
from storage.traces.reading import TraceTensors, read_head, read_sample
from storage.traces.verification import TraceProblem, verify_fragment

if TYPE_CHECKING:
    import torch

__all__ = [
    "FragmentRef",
    "TraceCollection",
    "TraceProblem",
    "TraceRow",
    "TraceSample",
    "TraceSnapshot",
    "TraceStore",
    "TraceTensors",
    "Written",
]

_OPEN_FRAGMENTS = 64
_AHEAD = 4
_SHOWN = 5
_LOOKS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class FragmentRef:
    """A fragment that holds samples which were handed over to be written.

    Attributes:
        fragment_id: the fragment, which stands for its content and layout.
        num_samples: how many of the samples it holds.
        num_tokens: their tokens.
        num_bytes: bytes of their tensors.
    """

    fragment_id: str
    num_samples: int
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a write.

    Attributes:
        committed: ids of the samples that this write found missing and committed, as may another one at the same time.
        fragments: the fragments that hold all of the samples: one, unless some had been committed before.
    """

    committed: tuple[str, ...]
    fragments: tuple[FragmentRef, ...]


class TraceStore:
    """The trace store at a place.

    Args:
        root: the folder or s3:// URL; it is made by the first write.
        chunk_tokens: tokens of a chunk, the smallest part that is read; at most these.
        compression: how new fragments are compressed, one of `COMPRESSIONS`; every fragment knows its own.
    """

    def __init__(self, root: str | Path, *, chunk_tokens: int = 1024, compression: str = "none") -> None:
        if chunk_tokens < 1:
            raise StorageError(f"chunk_tokens is {chunk_tokens}: expected at least 1")
        if compression not in COMPRESSIONS:
            raise StorageError(f"compression {compression!r}: expected one of {', '.join(COMPRESSIONS)}")
        self.place = Place.at(root)
        self._chunk_tokens, self._compression = chunk_tokens, compression
        self._open = functools.lru_cache(_OPEN_FRAGMENTS)(lambda name: Fragment.open(self.place, name))

    def write_fragment(
        self,
        *,
        collection: str,
        model_digest: str,
        samples: Sequence[TraceSample],
        keys: torch.Tensor,
        values: torch.Tensor,
        importance: torch.Tensor,
    ) -> Written:
        """Write and commit the traces of samples whose context tokens lie end to end.

        A sample that the collection has already is not committed again. Any number of processes may write at once.

        Args:
            collection: key of the collection.
            model_digest: digest of the model that made the traces.
            samples: the samples, in the order of their tokens.
            keys: (head, token, dim) in one of `storage.traces.fragment_content.STORED_DTYPES`.
            values: (head, token, dim) in the same type.
            importance: (head, token) float32.

        Raises:
            StorageError: if the arguments disagree or the store cannot be written; then nothing is committed.
        """
        draft = FragmentDraft.of(
            collection=collection,
            model_digest=model_digest,
            samples=samples,
            keys=keys,
            values=values,
            importance=importance,
        )
        manifest = make_manifest(self.place)
        # What another machine stored may differ in its last bits from what was made now: what is there stays.
        before = {row.sample_id for row in self._present(collection, draft.sample_ids)}
        fragment_id = draft.name([self._chunk_tokens, self._compression])
        if len(before) < len(samples):
            metadata = self._publish(fragment_id, draft)
            # That took a while: look again, so that what another writer committed meanwhile is not even appended.
            present = {row.sample_id for row in self._present(collection, draft.sample_ids)}
            manifest.commit(row for row in draft.rows(fragment_id, metadata) if row.sample_id not in present)
        holders = self._present(collection, draft.sample_ids)
        if len(holders) < len(samples):  # what lay there unused was swept away in between
            raise StorageError(f"fragment {fragment_id} was removed while it was committed; collect it again")
        return Written(
            committed=tuple(row.sample_id for row in holders if row.sample_id not in before),
            fragments=_refs(holders, bytes_per_token=draft.bytes_per_token),
        )

    def uri_of(self, fragment_id: str) -> str:
        """Return where a fragment lies, as a path or URL."""
        return self.place.join(fragments.path_of(fragment_id))

    def _present(self, collection: str, sample_ids: Sequence[str]) -> list[TraceRow]:
        """Rows of samples whose fragments are there."""
        rows = self.rows(collection, sample_ids=sample_ids)
        lost = self.missing({row.fragment_id for row in rows})
        return [row for row in rows if row.fragment_id not in lost]

    def missing(self, fragment_ids: Collection[str]) -> set[str]:
        """Return which of some fragments are not there.

        Raises:
            StorageError: if the place cannot be reached.
        """
        if not fragment_ids:
            return set()
        with ThreadPoolExecutor(_LOOKS_AT_ONCE) as looks:  # an object store answers slowly, but many at once
            there = looks.map(functools.partial(fragments.is_there, self.place), fragment_ids)
            return {name for name, is_there in zip(fragment_ids, there, strict=True) if not is_there}

    def _publish(self, fragment_id: str, draft: FragmentDraft) -> str:
        """Write the fragment, unless another writer has, and return the digest of its metadata."""
        if fragments.is_there(self.place, fragment_id):
            fragments.touch(self.place, fragment_id)  # its writer may be long dead: `gc` must think it young
            return fragments.metadata_digest(self.place, fragment_id)
        return fragments.write(
            self.place,
            fragment_id,
            draft.tensors,
            draft.heads,
            draft.attributes(),
            chunk_tokens=self._chunk_tokens,
            compression=self._compression,
        )

    def rows(
        self, collection: str | None = None, *, sample_ids: Sequence[str] | None = None, version: int | None = None
    ) -> list[TraceRow]:
        """Return the samples that are committed, in the order of their commits.

        Args:
            collection: only of this collection.
            sample_ids: only these samples.
            version: as of this version of the manifest.
        """
        manifest = find_manifest(self.place)
        listed = [] if manifest is None else manifest.rows(collection, sample_ids=sample_ids, version=version)
        by_sample: dict[tuple[str, str], list[TraceRow]] = {}
        for row in listed:
            by_sample.setdefault((row.collection, row.sample_id), []).append(row)
        # The first counts, unless its fragment is gone and a later one is there.
        lost = self.missing({row.fragment_id for rows in by_sample.values() if len(rows) > 1 for row in rows})
        return [next((row for row in rows if row.fragment_id not in lost), rows[0]) for rows in by_sample.values()]

    def collections(self) -> dict[str, TraceCollection]:
        """Return every collection's key with what it has, in the order of their first commits."""
        manifest = find_manifest(self.place)
        counts = {} if manifest is None else manifest.counts()
        return {key: count or TraceCollection.of(self.rows(key)) for key, count in counts.items()}

    def collection(self, prefix: str | None = None) -> list[TraceRow]:
        """Return the samples of the one collection whose key begins so; without a prefix, of the only one there is.

        Raises:
            StorageError: if there is none or more than one.
        """
        keys = self._keys(prefix or "")
        if len(keys) != 1:
            known = ", ".join(key[:12] for key in keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "") or "none"
            asked = "the store" if prefix is None else f"{prefix!r}"
            raise StorageError(f"{asked} means {len(keys)} collections ({known}): name one, see `kvp traces list`")
        return self.rows(keys[0])

    def _keys(self, prefix: str = "") -> list[str]:
        manifest = find_manifest(self.place)
        return [] if manifest is None else manifest.keys(prefix)

    def version(self) -> int:
        """Return the latest version of the manifest; 0 if nothing was ever committed."""
        manifest = find_manifest(self.place)
        return 0 if manifest is None else manifest.version()

    def compact(self) -> tuple[int, int]:
        """Merge the manifest's small files; returns how many there were and are. Old versions stay readable.

        Raises:
            StorageError: if the manifest cannot be written.
        """
        manifest = find_manifest(self.place)
        return (0, 0) if manifest is None else manifest.compact()

    def snapshot(self, collection: str, *, manifest_version: int | None = None) -> TraceSnapshot:
        """Take a collection as it is, or as it was at a version of the manifest.

        Args:
            collection: key of the collection.
            manifest_version: the version; the latest by default.

        Raises:
            StorageError: if there is no such version or it holds no such samples.
        """
        version = self.version() if manifest_version is None else manifest_version
        rows = sorted(self.rows(collection, version=version), key=lambda row: row.sample_id)
        if not rows:
            raise StorageError(f"no traces for collection {collection} in {self.place.url}: collect them first")
        return TraceSnapshot(collection=collection, manifest_version=version, rows=tuple(rows))

    def read(self, row: TraceRow, heads: slice | None = None) -> TraceTensors:
        """Read one sample.

        Args:
            row: the sample.
            heads: consecutive KV heads; all by default.

        Raises:
            StorageError: if the heads are not consecutive or none, or the traces are missing or damaged.
        """
        return read_sample(self._open(row.fragment_id), row, heads or slice(None))

    def scan(self, rows: Iterable[TraceRow], head: int) -> Iterator[tuple[TraceRow, TraceTensors]]:
        """Read one head of many samples, a fragment at a time and some ahead: sequential reads in bounded memory.

        Args:
            rows: the samples; those of one fragment come together, in the order of their first.
            head: the KV head.

        Yields:
            Each sample with its traces, (1, token, dim) and (1, token), views of what was read of its fragment.

        Raises:
            StorageError: if there is no such head, or its traces are missing or damaged.
        """

        def read(group: list[TraceRow]) -> Iterator[tuple[TraceRow, TraceTensors]]:
            return zip(group, read_head(self._open(group[0].fragment_id), group, head), strict=True)

        with ThreadPoolExecutor(_AHEAD, thread_name_prefix="scan") as readers:
            groups = iter(_by_fragment(rows).values())
            ahead = deque(readers.submit(read, group) for group in islice(groups, _AHEAD))
            while ahead:
                done = ahead.popleft().result()
                ahead.extend(readers.submit(read, group) for group in islice(groups, 1))
                yield from done

    def verify(self, collection: str | None = None) -> list[TraceProblem]:
        """Read every committed byte again and name what is damaged.

        Args:
            collection: only this collection; all by default.
        """
        problems: list[TraceProblem] = []
        for key in self._keys() if collection is None else [collection]:
            for name, rows in _by_fragment(self.rows(key)).items():
                problems += verify_fragment(self.place, name, rows)
        return problems

    def discard(self, fragment_ids: Iterable[str]) -> None:
        """Remove damaged fragments, so that their samples can be collected again.

        Raises:
            StorageError: if one cannot be removed.
        """
        for name in sorted(set(fragment_ids)):
            fragments.remove(self.place, name)
            self._open.cache_clear()

    def gc(self, *, min_age_s: float = 3600) -> list[str]:
        """Remove what no committed sample needs, and return the names of the removed fragments.

        Args:
            min_age_s: leave younger ones alone: a live writer may be about to commit them.

        Raises:
            StorageError: if one cannot be removed.
        """
        # List before asking the manifest: what is committed in between is then kept.
        candidates = [name for name in self.place.folders(FRAGMENTS) if self._age_s(name) >= min_age_s]
        needed = self._needed()
        removed = []
        for name in candidates:
            # Asked again just before: a writer that takes over what lies there makes it young.
            if name not in needed and self._age_s(name) >= min_age_s:
                fragments.remove(self.place, name)
                removed.append(name)
        return removed

    def _needed(self) -> set[str]:
        """Fragments that hold samples; of two with one sample only the one that counts."""
        manifest = find_manifest(self.place)
        if manifest is None:
            return set()
        doubled = [key for key, count in manifest.counts().items() if count is None]
        counted = {row.fragment_id for key in doubled for row in self.rows(key)}
        return manifest.fragment_ids(without=doubled) | counted

    def _age_s(self, fragment_id: str) -> float:
        """Seconds since something of a fragment was written; negative if a clock jumped back, which is young."""
        newest = self.place.newest(fragments.path_of(fragment_id))
        return -1 if newest is None else (dt.datetime.now(dt.UTC) - newest).total_seconds()


def _by_fragment(rows: Iterable[TraceRow]) -> dict[str, list[TraceRow]]:
    """Rows by the fragment that holds them, both in the order of the rows."""
    by_fragment: dict[str, list[TraceRow]] = {}
    for row in rows:
        by_fragment.setdefault(row.fragment_id, []).append(row)
    return by_fragment


def _refs(rows: Sequence[TraceRow], *, bytes_per_token: int) -> tuple[FragmentRef, ...]:
    """The fragments that hold rows, in the order of their first."""
    by_fragment = _by_fragment(rows)
    held = {name: sum(row.context_tokens for row in part) for name, part in by_fragment.items()}
    return tuple(
        FragmentRef(
            fragment_id=name,
            num_samples=len(part),
            num_tokens=held[name],
            num_bytes=held[name] * bytes_per_token,
        )
        for name, part in by_fragment.items()
    )
