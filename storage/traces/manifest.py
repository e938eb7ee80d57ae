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

from kvpolicy.digests import digest_json
from kvpolicy.errors import first_line
from storage.errors import StorageError
from storage.tables.lance_table import Table, quote

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
        metadata_digest: digest of the fragment's metadata documents.
    """

    collection: str
    model_digest: str
    fragment_id: str
    start: int
    sample_digest: str
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
    def num_tokens(self) -> int:
        """Context tokens of all samples."""
        return sum(row.context_tokens for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class TraceCollection:
    """What a collection has.

    Attributes:
        collection: its key.
        samples: samples.
        tokens: their context tokens.
        fragments: fragments that hold them.
        splits: their splits, in the order of the alphabet.
        model_digest: digest of the model.
    """

    collection: str
    samples: int
    tokens: int
    fragments: int
    splits: tuple[str, ...]
    model_digest: str

    @classmethod
    def of(cls, rows: Sequence[TraceRow]) -> TraceCollection:
        """Count the samples of one collection."""
        return cls(
            collection=rows[0].collection,
            samples=len(rows),
            tokens=sum(row.context_tokens for row in rows),
            fragments=len({row.fragment_id for row in rows}),
            splits=tuple(sorted({row.split for row in rows})),
            model_digest=rows[0].model_digest,
        )


# `of`, over all collections at once. Ids are compared by their hashes, which takes a third of the memory.
_COUNTED = """
    SELECT collection, count(*) AS samples, sum(context_tokens)::BIGINT AS tokens,
           count(DISTINCT fragment_id) AS fragments, list_sort(list(DISTINCT split)) AS splits,
           any_value(model_digest) AS model_digest, count(DISTINCT hash(sample_id)) AS different
    FROM rows GROUP BY collection ORDER BY min(_rowid)
"""
_COUNTED_COLUMNS = ("collection", "sample_id", "context_tokens", "fragment_id", "split", "model_digest")


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
            matching: Sequence[dict[str, Any]] = self._table.scan_in(
                "sample_id", sample_ids, where or "true", _ROW_FIELDS, version
            )
        else:
            matching = self._table.scan(where, _ROW_FIELDS, version).to_pylist()
        return [TraceRow(**{name: row[name] for name in _ROW_FIELDS}) for row in matching]

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of the collections that begin so, in the order of their first commits."""
        # A range, which an index serves; "~" comes after every character of a key.
        where = f"collection BETWEEN {quote(prefix)} AND {quote(prefix + '~')}"
        collections: list[str] = self._table.scan(where, ["collection"])["collection"].unique().to_pylist()
        return collections

    def counts(self) -> dict[str, TraceCollection | None]:
        """Count what each collection has, by its key; None where a sample has two rows, of which one counts.

        This reads a few columns of all rows, and none of them into Python's objects.

        Raises:
            StorageError: if they cannot be read, or memory is too short for it.
        """
        import duckdb

        # Or what does not fit into memory would go to a folder where the process runs.
        with duckdb.connect(":memory:", config={"temp_directory": ""}) as connection:
            try:
                connection.from_arrow(self._table.reader(_COUNTED_COLUMNS)).create_view("rows")
                counted = connection.sql(_COUNTED).to_arrow_table().to_pylist()
            except duckdb.Error as error:
                raise StorageError(f"manifest at {self.uri} cannot be counted: {first_line(error)}") from error
        return {
            row["collection"]: None
            if row.pop("different") < row["samples"]
            else TraceCollection(**{**row, "splits": tuple(row["splits"])})
            for row in counted
        }

    def fragment_ids(self, *, without: Iterable[str] = ()) -> set[str]:
        """Return the fragments of all collections, some left out."""
        keys = ", ".join(map(quote, without))
        listed = self._table.scan(f"collection NOT IN ({keys})" if keys else None, ["fragment_id"])
        return set(listed["fragment_id"].unique().to_pylist())

    def compact(self) -> tuple[int, int]:
        """Merge small files; returns how many there were and are."""
        return self._table.compact()
