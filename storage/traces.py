"""The trace store: keys, values and importance of every KV head, for terabytes of samples.

A fragment (`storage.fragments`) is written under a temporary name, renamed, and then committed by one append to the
manifest (`storage.manifest`). Until that append it does not exist for readers, so a writer that dies leaves only
garbage, which `TraceStore.gc` removes.

Fragments are named by their content. So what was lost or discarded and is collected again comes to lie where the
manifest says that it is, and every snapshot that needs it is whole again.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from storage import fragments
from storage.digests import digest_json
from storage.errors import StorageError
from storage.fragments import ARRAYS, Fragment, FragmentTensors, Span
from storage.manifest import Manifest, TraceRow, TraceSample, TraceSnapshot
from storage.verification import TraceProblem, verify_fragment

if TYPE_CHECKING:
    import torch

__all__ = [
    "FragmentRef",
    "TraceProblem",
    "TraceRow",
    "TraceSample",
    "TraceSnapshot",
    "TraceStore",
    "TraceTensors",
]

FORMAT_VERSION = 1
_DRAFT = ".tmp-"
_OPEN_FRAGMENTS = 64


@dataclass(frozen=True, kw_only=True)
class FragmentRef:
    """What became of a write.

    Attributes:
        fragment_id: the fragment; if all samples had been committed before, the one that holds the first of them.
        digest: digest of its content.
        num_samples: samples that were handed over.
        num_tokens: their tokens.
        num_bytes: bytes of their tensors.
        committed: ids of the samples that this write committed; the others had been committed before.
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
    """The trace store under a folder.

    Args:
        root: the folder; it is made by the first write.
        chunk_tokens: tokens of a chunk, the smallest part that is read; at most these.
    """

    def __init__(self, root: str | Path, *, chunk_tokens: int = 1024) -> None:
        if chunk_tokens < 1:
            raise StorageError(f"chunk_tokens is {chunk_tokens}: expected at least 1")
        self.root = Path(root).absolute()
        self._chunk_tokens = chunk_tokens
        self._fragments = self.root / "fragments"
        self._manifest = Manifest(uri=str(self.root / "manifest.lance"))
        self._open = functools.lru_cache(_OPEN_FRAGMENTS)(lambda name: Fragment.open(self._fragments / name))

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
            keys: (head, token, dim) in bfloat16, float16 or float32.
            values: (head, token, dim) in the same type.
            importance: (head, token) float32.

        Raises:
            StorageError: if the arguments disagree or the store cannot be written; then nothing is committed.
        """
        spans = _spans(samples, num_tokens=keys.shape[1] if keys.ndim > 1 else 0)
        tensors = FragmentTensors.from_torch(keys, values, importance)
        sample_ids = [sample.sample_id for sample in samples]
        num_bytes = sum(getattr(tensors, name).nbytes for name in ARRAYS)
        heads = fragments.head_digests(tensors.keys, tensors.values, tensors.importance, spans)
        digests = [
            fragments.sample_digest(name, tensors.logical_dtype, tensors.dims, stop - start, heads[index])
            for index, (name, (start, stop)) in enumerate(zip(sample_ids, spans, strict=True))
        ]
        digest = digest_json([list(pair) for pair in zip(sample_ids, digests, strict=True)])

        def ref(fragment_id: str, committed: tuple[str, ...]) -> FragmentRef:
            return FragmentRef(
                fragment_id=fragment_id,
                digest=digest,
                num_samples=len(samples),
                num_tokens=spans[-1][1],
                num_bytes=num_bytes,
                committed=committed,
            )

        earlier = self._present(collection, sample_ids)
        if len(earlier) == len(samples):
            # What another machine stored may differ in its last bits from what was made now: name what is stored.
            return dataclasses.replace(ref(earlier[0].fragment_id, ()), digest=earlier[0].fragment_digest)
        fragment_id = digest_json([FORMAT_VERSION, collection, digest, self._chunk_tokens])[:32]
        attributes = {
            "format_version": FORMAT_VERSION,
            "logical_dtype": tensors.logical_dtype,
            "collection": collection,
            "model_digest": model_digest,
            "digest": digest,
            "samples": [
                {**asdict(sample), "start": start, "digest": sample_digest}
                for sample, (start, _), sample_digest in zip(samples, spans, digests, strict=True)
            ],
        }
        metadata = self._publish(fragment_id, tensors, heads, attributes)
        # The write took a while: look again, so that what another writer committed meanwhile is not even appended.
        present = {row.sample_id for row in self._present(collection, sample_ids)}
        self._manifest.commit(
            TraceRow(
                **asdict(sample),
                collection=collection,
                model_digest=model_digest,
                fragment_id=fragment_id,
                start=start,
                sample_digest=sample_digest,
                fragment_digest=digest,
                metadata_digest=metadata,
            )
            for sample, (start, _), sample_digest in zip(samples, spans, digests, strict=True)
            if sample.sample_id not in present
        )
        winners = self._present(collection, sample_ids)
        if len(winners) < len(samples):  # what lay there unused was swept away in between
            raise StorageError(f"fragment {fragment_id} was removed while it was committed; collect it again")
        return ref(fragment_id, tuple(row.sample_id for row in winners if row.fragment_id == fragment_id))

    def _present(self, collection: str, sample_ids: Sequence[str]) -> list[TraceRow]:
        """Rows of samples whose fragments are there."""
        rows = self.rows(collection, sample_ids=sample_ids)
        return [row for row in rows if (self._fragments / row.fragment_id).is_dir()]

    def _publish(
        self,
        fragment_id: str,
        tensors: FragmentTensors,
        heads: np.ndarray[Any, Any],
        attributes: dict[str, object],
    ) -> str:
        """Write the fragment's folder and return the digest of its metadata."""
        draft, place = self._fragments / f"{_DRAFT}{uuid.uuid4().hex}", self._fragments / fragment_id
        fragments.write(draft, tensors, heads, attributes, self._chunk_tokens)
        try:
            metadata = fragments.metadata_digest(draft)
            draft.rename(place)  # fails if a folder with content is there
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if not place.is_dir():
                raise StorageError(
                    f"cannot publish fragment {place}: {error.strerror}; nothing was committed"
                ) from error
            place.touch()  # another writer's, of the same content, perhaps long dead: `gc` must think it young
        return metadata

    def committed_samples(self, collection: str) -> set[str]:
        """Return the ids of the samples that a collection has."""
        return self._manifest.sample_ids(collection)

    def rows(
        self, collection: str | None = None, *, sample_ids: Sequence[str] | None = None, version: int | None = None
    ) -> list[TraceRow]:
        """Return the samples that are committed, in the order of their commits.

        Args:
            collection: only of this collection.
            sample_ids: only these samples.
            version: as of this version of the manifest.
        """
        found = self._manifest.rows(collection, sample_ids=sample_ids, version=version)
        by_sample: dict[tuple[str, str], TraceRow] = {}
        for row in found:
            key = (row.collection, row.sample_id)
            # The first counts, unless its fragment is gone and a later one is there.
            if key not in by_sample or not (self._fragments / by_sample[key].fragment_id).is_dir():
                by_sample[key] = row
        return list(by_sample.values())

    def collections(self) -> dict[str, list[TraceRow]]:
        """Return every collection's key with its samples."""
        found: dict[str, list[TraceRow]] = {}
        for row in self.rows():
            found.setdefault(row.collection, []).append(row)
        return found

    def collection(self, prefix: str | None = None) -> list[TraceRow]:
        """Return the samples of the one collection whose key begins so; without a prefix, of the only one there is.

        Raises:
            StorageError: if there is none or more than one.
        """
        found = {key: rows for key, rows in self.collections().items() if key.startswith(prefix or "")}
        if len(found) != 1:
            known = ", ".join(key[:12] for key in found) or "none"
            asked = "the store" if prefix is None else f"{prefix!r}"
            raise StorageError(f"{asked} means {len(found)} collections ({known}): name one, see `kvp traces list`")
        return next(iter(found.values()))

    def compact(self) -> tuple[int, int]:
        """Merge the manifest's small files; returns how many there were and are. Old versions stay readable.

        Raises:
            StorageError: if the manifest cannot be written.
        """
        return self._manifest.compact()

    def snapshot(
        self, collection: str, *, splits: Sequence[str] | None = None, manifest_version: int | None = None
    ) -> TraceSnapshot:
        """Take a collection as it is, or as it was at a version of the manifest.

        Args:
            collection: key of the collection.
            splits: only samples of these splits.
            manifest_version: the version; the latest by default.

        Raises:
            StorageError: if there is no such version or it holds no such samples.
        """
        version = self._manifest.version() if manifest_version is None else manifest_version
        rows = [row for row in self.rows(collection, version=version) if splits is None or row.split in splits]
        if not rows:
            which = "" if splits is None else f" of splits {', '.join(splits)}"
            raise StorageError(f"no traces{which} for collection {collection} in {self.root}: collect them first")
        return TraceSnapshot(
            collection=collection,
            manifest_version=version,
            rows=tuple(sorted(rows, key=lambda row: row.sample_id)),
        )

    def read(self, row: TraceRow, heads: slice | None = None) -> TraceTensors:
        """Read one sample.

        Args:
            row: the sample.
            heads: consecutive KV heads; all by default.

        Raises:
            StorageError: if the heads are not consecutive or none, or the traces are missing or damaged.
        """
        import torch

        fragment = self._open(row.fragment_id)
        first, last, step = (heads or slice(None)).indices(fragment.num_heads)
        if step != 1 or last <= first:
            asked = "" if heads is None else f"{heads.start}:{heads.stop}:{heads.step or 1} (first, end, step)"
            raise StorageError(
                f"heads {asked}: expected at least one of 0 to {fragment.num_heads - 1}, in consecutive order"
            )
        keys, values, importance = (fragment.read(name, (first, last), (row.start, row.stop)) for name in ARRAYS)
        digests = fragments.head_digests(keys, values, importance, [(0, row.context_tokens)])[0]
        wrong = np.flatnonzero((digests != fragment.stored_digests(row.start)[first:last]).any(axis=1))
        if wrong.size:
            raise StorageError(
                f"fragment {row.fragment_id}, sample {row.sample_id}, head {first + int(wrong[0])}: damaged, its"
                " content is not what was written; run `kvp traces verify --discard`, then collect it again"
            )
        return TraceTensors(
            keys=fragments.to_torch(keys, fragment.logical_dtype),
            values=fragments.to_torch(values, fragment.logical_dtype),
            importance=fragments.to_torch(importance, "float32"),
            positions=torch.arange(row.context_tokens),
        )

    def verify(self, collection: str | None = None) -> list[TraceProblem]:
        """Read every committed byte again and name what is damaged.

        Args:
            collection: only this collection; all by default.
        """
        by_fragment: dict[str, list[TraceRow]] = {}
        for row in self.rows(collection):
            by_fragment.setdefault(row.fragment_id, []).append(row)
        return [
            problem for name, rows in by_fragment.items() for problem in verify_fragment(self._fragments / name, rows)
        ]

    def discard(self, fragment_ids: Iterable[str]) -> None:
        """Remove damaged fragments, so that their samples can be collected again.

        Raises:
            StorageError: if one cannot be removed.
        """
        for name in sorted(set(fragment_ids)):
            _remove(self._fragments / name)

    def gc(self, *, min_age_s: float = 3600) -> list[str]:
        """Remove what no committed sample needs, and return the names of the removed fragments.

        Args:
            min_age_s: leave younger folders alone: a live writer may be about to commit them.

        Raises:
            StorageError: if one cannot be removed.
        """
        if not self._fragments.is_dir():
            return []
        # List before asking the manifest: what is committed in between is then kept.
        candidates = [path for path in sorted(self._fragments.iterdir()) if _age_s(path) >= min_age_s]
        needed = {row.fragment_id for row in self.rows()}
        garbage = [path for path in candidates if path.name not in needed and _age_s(path) >= min_age_s]
        for path in garbage:
            _remove(path)
        return [path.name for path in garbage]


def _remove(folder: Path) -> None:
    """Remove a fragment's folder; at no moment is there half of one under its name."""
    doomed = folder.with_name(f"{_DRAFT}{uuid.uuid4().hex}")
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"cannot remove fragment {folder}: {error.strerror}; check the permissions") from error
    shutil.rmtree(doomed, ignore_errors=True)


def _spans(samples: Sequence[TraceSample], *, num_tokens: int) -> list[Span]:
    if not samples:
        raise StorageError("no samples to write: expected at least one")
    ids = [sample.sample_id for sample in samples]
    if len(set(ids)) < len(ids):
        raise StorageError(f"a sample id occurs twice among {', '.join(ids[:5])}: expected each once")
    lengths = [sample.context_tokens for sample in samples]
    if min(lengths) < 1 or sum(lengths) != num_tokens:
        raise StorageError(
            f"samples have {sum(lengths)} context tokens and keys {num_tokens}: expected the same, each >= 1"
        )
    stops = list(accumulate(lengths))
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _age_s(path: Path) -> float:
    try:
        newest = max(item.stat().st_mtime for item in [path, *path.iterdir()])
    except OSError:  # gone meanwhile: its writer renamed it
        return -1
    return time.time() - newest
