"""The trace store: keys, values and importance of every KV head, for terabytes of samples.

A fragment (`storage.fragments`) is written whole and then committed by one append to the manifest
(`storage.manifest`). Until that append it does not exist for readers, so a writer that dies leaves only garbage, which
`TraceStore.gc` removes.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from storage import fragments
from storage.errors import StorageError
from storage.fragment_content import ARRAYS, Span, head_digests, to_torch
from storage.fragment_draft import FragmentDraft
from storage.fragments import COMPRESSIONS, Fragment
from storage.manifest import TraceCollection, TraceRow, TraceSample, TraceSnapshot
from storage.places import Place
from storage.trace_layout import find_manifest, make_manifest
from storage.verification import TraceProblem, verify_fragment

if TYPE_CHECKING:
    import torch

__all__ = [
    "COMPRESSIONS",
    "FragmentRef",
    "TraceCollection",
    "TraceProblem",
    "TraceRow",
    "TraceSample",
    "TraceSnapshot",
    "TraceStore",
    "TraceTensors",
]

_OPEN_FRAGMENTS = 64
_AHEAD = 4
_SHOWN = 5
_LOOKS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class FragmentRef:
    """What became of a write.

    Attributes:
        fragment_id: the fragment; if all samples had been committed before, the one that holds the first of them.
        digest: digest of its content.
        num_samples: samples that were handed over.
        num_tokens: their tokens.
        num_bytes: bytes of their tensors.
        committed: ids of the samples that this write found missing and committed, as may another one at the same time.
    """

    fragment_id: str
    digest: str
    num_samples: int
    num_tokens: int
    num_bytes: int
    committed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TraceTensors:
    """Traces of one sample.

    Attributes:
        keys: (head, token, dim), as they were written.
        values: (head, token, dim), as they were written.
        importance: (head, token) float32.
        positions: (token) int64, the positions of the context tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    importance: torch.Tensor
    positions: torch.Tensor


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
    ) -> FragmentRef:
        """Write and commit the traces of samples whose context tokens lie end to end.

        A sample that the collection has already is not committed again. Any number of processes may write at once.

        Args:
            collection: key of the collection.
            model_digest: digest of the model that made the traces.
            samples: the samples, in the order of their tokens.
            keys: (head, token, dim) in one of `storage.fragment_content.STORED_DTYPES`.
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
        earlier = self._present(collection, draft.sample_ids)
        if len(earlier) == len(samples):
            # What another machine stored may differ in its last bits from what was made now: name what is stored.
            return _ref(draft, earlier[0].fragment_id, digest=earlier[0].fragment_digest, committed=())
        fragment_id = draft.name([self._chunk_tokens, self._compression])
        metadata = self._publish(fragment_id, draft)
        # The write took a while: look again, so that what another writer committed meanwhile is not even appended.
        present = {row.sample_id for row in self._present(collection, draft.sample_ids)}
        manifest.commit(row for row in draft.rows(fragment_id, metadata) if row.sample_id not in present)
        winners = self._present(collection, draft.sample_ids)
        if len(winners) < len(samples):  # what lay there unused was swept away in between
            raise StorageError(f"fragment {fragment_id} was removed while it was committed; collect it again")
        committed = tuple(row.sample_id for row in winners if row.fragment_id == fragment_id)
        return _ref(draft, fragment_id, digest=draft.digest, committed=committed)

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
        found = [] if manifest is None else manifest.rows(collection, sample_ids=sample_ids, version=version)
        by_sample: dict[tuple[str, str], TraceRow] = {}
        for row in found:
            key = (row.collection, row.sample_id)
            # The first counts, unless its fragment is gone and a later one is there.
            if key not in by_sample or not fragments.is_there(self.place, by_sample[key].fragment_id):
                by_sample[key] = row
        return list(by_sample.values())

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
        fragment = self._open(row.fragment_id)
        first, last, step = (heads or slice(None)).indices(fragment.num_heads)
        if step != 1 or last <= first:
            asked = "" if heads is None else f"{heads.start}:{heads.stop}:{heads.step or 1} (first, end, step)"
            raise StorageError(
                f"heads {asked}: expected at least one of 0 to {fragment.num_heads - 1}, in consecutive order"
            )
        blocks = [fragment.read(name, (first, last), (row.start, row.stop)) for name in ARRAYS]
        _check(fragment, [row], (first, last), blocks, [(0, row.context_tokens)])
        return _tensors(fragment, *blocks)

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
        by_fragment: dict[str, list[TraceRow]] = {}
        for row in rows:
            by_fragment.setdefault(row.fragment_id, []).append(row)

        def read(group: list[TraceRow]) -> list[tuple[TraceRow, TraceTensors]]:
            fragment = self._open(group[0].fragment_id)
            if not 0 <= head < fragment.num_heads:
                raise StorageError(f"head {head}: expected one of 0 to {fragment.num_heads - 1}")
            blocks, spans = fragment.read_head(head), [(row.start, row.stop) for row in group]
            _check(fragment, group, (head, head + 1), blocks, spans)
            return [
                (row, _tensors(fragment, *(block[:, slice(*span)] for block in blocks)))
                for row, span in zip(group, spans, strict=True)
            ]

        with ThreadPoolExecutor(_AHEAD, thread_name_prefix="scan") as readers:
            groups = iter(by_fragment.values())
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
            by_fragment: dict[str, list[TraceRow]] = {}
            for row in self.rows(key):
                by_fragment.setdefault(row.fragment_id, []).append(row)
            for name, rows in by_fragment.items():
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
        candidates = [name for name in self.place.folders(fragments.FOLDER) if self._age_s(name) >= min_age_s]
        needed = self._needed()
        garbage = [name for name in candidates if name not in needed and self._age_s(name) >= min_age_s]
        for name in garbage:
            fragments.remove(self.place, name)
        return garbage

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


def _check(
    fragment: Fragment,
    rows: Sequence[TraceRow],
    heads: Span,
    blocks: Sequence[np.ndarray[Any, Any]],
    spans: Sequence[Span],
) -> None:
    """Compare what was read of some heads, and the samples at spans of it, with the digests of what was written."""
    for row, digests in zip(rows, head_digests(blocks, spans), strict=True):
        wrong = np.flatnonzero((digests != fragment.stored_digests(row.start)[slice(*heads)]).any(axis=1))
        if wrong.size:
            raise StorageError(
                f"fragment {row.fragment_id}, sample {row.sample_id}, head {heads[0] + int(wrong[0])}: damaged, its"
                " content is not what was written; run `kvp traces verify --discard`, then collect it again"
            )


def _ref(draft: FragmentDraft, fragment_id: str, *, digest: str, committed: tuple[str, ...]) -> FragmentRef:
    return FragmentRef(
        fragment_id=fragment_id,
        digest=digest,
        num_samples=len(draft.samples),
        num_tokens=draft.spans[-1][1],
        num_bytes=sum(block.nbytes for block in draft.tensors.blocks),
        committed=committed,
    )


def _tensors(
    fragment: Fragment, keys: np.ndarray[Any, Any], values: np.ndarray[Any, Any], importance: np.ndarray[Any, Any]
) -> TraceTensors:
    import torch

    return TraceTensors(
        keys=to_torch(keys, fragment.logical_dtype),
        values=to_torch(values, fragment.logical_dtype),
        importance=to_torch(importance, "float32"),
        positions=torch.arange(importance.shape[1]),
    )
