"""The manifest of the trace store: one row for each committed sample. A row here is what makes traces exist.

Appends never conflict, so two writers may both commit one sample: then it has two rows. Which one counts is the store's
to say, which knows what lies there.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from storage.digests import digest_json, short_id
from storage.tables import Table, quote

SCHEMA = pa.schema(
    [
        pa.field("collection", pa.string(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("benchmark", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("setting", pa.string(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("prompt_digest", pa.string(), nullable=False),
        pa.field("context_tokens", pa.int64(), nullable=False),
        pa.field("model_digest", pa.string(), nullable=False),
        pa.field("fragment_id", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("sample_digest", pa.string(), nullable=False),
        pa.field("fragment_digest", pa.string(), nullable=False),
        pa.field("metadata_digest", pa.string(), nullable=False),
        pa.field("committed_at", pa.timestamp("us"), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class TraceSample:
    """A sample whose traces are stored.

    Attributes:
        sample_id: id of the sample; one collection holds it once.
        benchmark: benchmark that it belongs to.
        task: task of the benchmark.
        split: train, validation or test.
        setting: query_aware or query_agnostic.
        seed: seed that generated it.
        prompt_digest: sha256 of the prompt.
        context_tokens: tokens whose keys, values and importance are stored.
    """

    sample_id: str
    benchmark: str
    task: str
    split: str
    setting: str
    seed: int
    prompt_digest: str
    context_tokens: int


@dataclass(frozen=True, kw_only=True)
class TraceRow(TraceSample):
    """A committed sample and where its traces lie.

    Attributes:
        collection: key of the collection (one model, prompts and parameters).
        model_digest: digest of the model.
        fragment_id: fragment that holds it.
        start: its first token in the fragment.
        sample_digest: digest of its traces' content.
        fragment_digest: digest of the fragment's content.
        metadata_digest: digest of the fragment's metadata documents.
    """

    collection: str
    model_digest: str
    fragment_id: str
    start: int
    sample_digest: str
    fragment_digest: str
    metadata_digest: str

    @property
    def stop(self) -> int:
        """The token after its last in the fragment."""
        return self.start + self.context_tokens


_ROW_FIELDS = [field.name for field in dataclasses.fields(TraceRow)]
_CONTENT_FIELDS = [*(field.name for field in dataclasses.fields(TraceSample)), "model_digest", "sample_digest"]


@dataclass(frozen=True, kw_only=True)
class TraceSnapshot:
    """A set of traces that stays what it is.

    Attributes:
        collection: collection that it was taken from.
        manifest_version: version of the manifest at which it can be taken again.
        rows: its samples, by sample id.
    """

    collection: str
    manifest_version: int
    rows: tuple[TraceRow, ...]

    @property
    def digest(self) -> str:
        """Digest of what the samples are and hold, not of when, where or in which fragments they were written."""
        return digest_json([[getattr(row, name) for name in _CONTENT_FIELDS] for row in self.rows])

    @property
    def snapshot_id(self) -> str:
        """Artifact id of the snapshot."""
        return short_id("trace_snapshot", self.digest)

    @property
    def num_tokens(self) -> int:
        """Context tokens of all samples."""
        return sum(row.context_tokens for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest at a place.

    Attributes:
        uri: folder or URL of its Lance table.
        options: what Lance has to know to reach it.
    """

    uri: str
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def _table(self) -> Table:
        return Table(name="manifest", uri=self.uri, schema=SCHEMA, options=self.options, indexed=("collection",))

    def create(self) -> None:
        """Make it empty, at a place that nobody else can know of yet."""
        self._table.create()

    def version(self) -> int:
        """Return the latest version; 0 if nothing was ever committed."""
        return self._table.version()

    def commit(self, rows: Iterable[TraceRow]) -> None:
        """Append rows: from here on their samples exist."""
        now = dt.datetime.now(dt.UTC).replace(tzinfo=None)
        self._table.append([{**dataclasses.asdict(row), "committed_at": now} for row in rows])

    def rows(
        self, collection: str | None = None, *, sample_ids: Collection[str] | None = None, version: int | None = None
    ) -> list[TraceRow]:
        """Return the rows, in the order of their commits.

        Args:
            collection: only of this collection.
            sample_ids: only of these samples.
            version: as of this version of the manifest.
        """
        where = None if collection is None else f"collection = {quote(collection)}"
        if sample_ids is not None:
            found: Sequence[dict[str, Any]] = self._table.scan_in("sample_id", sample_ids, where or "true")
        else:
            found = self._table.scan(where, _ROW_FIELDS, version).to_pylist()
        return [TraceRow(**{name: row[name] for name in _ROW_FIELDS}) for row in found]

    def compact(self) -> tuple[int, int]:
        """Merge small files; returns how many there were and are."""
        return self._table.compact()

    def sample_ids(self, collection: str) -> set[str]:
        """Return the ids of a collection's samples."""
        found = self._table.scan(f"collection = {quote(collection)}", ["sample_id"])
        return set(found["sample_id"].to_pylist())
