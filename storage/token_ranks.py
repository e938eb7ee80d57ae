"""Rankings of contexts token by token, as two Parquet files in the folder of an evaluation shard.

`contexts.parquet` has a row for each context: the text of its tokens, and what the future pays each of them in every
head. `rankings.parquet` has a row for each ranking of one of them. Both have a row group for each context, so that one
is read without the others. Arrays lie flat, heads one after the other; Parquet packs ranks into as many bits as the
length of the context needs (90 heads, 900 tokens: about 100 KB a ranking).
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.errors import StorageError, one_line, remedy_for

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

CONTEXTS, RANKINGS = "contexts.parquet", "rankings.parquet"
_DIGEST = "content_sha256"
_NAME = ("sample_id", "benchmark", "task", "setting")
_REPEATED = ["ranks.list.element", "kept.list.element", "pieces.list.element"]
_COLUMNS = {
    CONTEXTS: (*_NAME, "budgets", "num_heads", "num_tokens", "pieces", "importance"),
    RANKINGS: (*_NAME, "method", "seed", "ranks", "kept"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredRanking:
    """The order in which one method gives up the tokens of a context.

    Attributes:
        method: the method.
        seed: its seed.
        ranks: (head, token) from 1, kept longest; a head that keeps b tokens keeps ranks 1 to b.
        kept: (budget, head) tokens that a head keeps at each of the context's budgets.
    """

    method: str
    seed: int
    ranks: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredContext:
    """A context, what its tokens are worth, and rankings of them.

    Attributes:
        sample_id: the sample.
        benchmark: its benchmark.
        task: its task.
        setting: query_aware or query_agnostic.
        budgets: entries kept per KV head, in tokens.
        pieces: text of each token.
        importance: (head, token) attention that the future pays.
        rankings: in the order of the methods.
    """

    sample_id: str
    benchmark: str
    task: str
    setting: str
    budgets: tuple[int, ...]
    pieces: tuple[str, ...]
    importance: npt.NDArray[np.float32]
    rankings: tuple[StoredRanking, ...]

    def __post_init__(self) -> None:
        """Check that all arrays are of the same heads and tokens.

        Raises:
            StorageError: if one is not.
        """
        shape = self.importance.shape
        if len(shape) != 2 or shape[1] != len(self.pieces):
            raise StorageError(
                f"context of {self.sample_id}: importance has shape {shape}, expected heads x {len(self.pieces)} tokens"
            )
        for ranking in self.rankings:
            if ranking.ranks.shape != shape or ranking.kept.shape != (len(self.budgets), shape[0]):
                raise StorageError(
                    f"context of {self.sample_id}: {ranking.method} has ranks of shape {ranking.ranks.shape} and kept "
                    f"counts of {ranking.kept.shape}, expected {shape} and {(len(self.budgets), shape[0])}"
                )

    @property
    def name(self) -> dict[str, str]:
        """What names it in both files."""
        return {name: getattr(self, name) for name in _NAME}

    def find(self, method: str, seed: int) -> StoredRanking | None:
        """The ranking of a method, if it was read."""
        return next((ranking for ranking in self.rankings if (ranking.method, ranking.seed) == (method, seed)), None)


def digest_of(contexts: Iterable[StoredContext]) -> str:
    """Return the digest of the content of some contexts."""
    hasher = hashlib.sha256()
    for context in contexts:
        for text in (*context.name.values(), *context.pieces):
            hasher.update(f"{len(text)} {text}".encode())
        hasher.update(np.asarray(context.budgets, dtype="<i8").tobytes())
        hasher.update(np.ascontiguousarray(context.importance, dtype="<f4").tobytes())
        for ranking in context.rankings:
            hasher.update(f"{ranking.method} {ranking.seed} {ranking.ranks.shape}".encode())
            hasher.update(np.ascontiguousarray(ranking.ranks, dtype="<i4").tobytes())
            hasher.update(np.ascontiguousarray(ranking.kept, dtype="<i4").tobytes())
    return hasher.hexdigest()


def write_token_ranks(folder: Path, contexts: Sequence[StoredContext]) -> None:
    """Write both files; each appears when it is complete, and replaces one that is there.

    Args:
        folder: where they go; it is made if it is missing.
        contexts: none are fine: the files then say that there are none.

    Raises:
        StorageError: if they cannot be written.
    """
    digest = digest_of(contexts)
    _write(folder / CONTEXTS, ([_context_row(context)] for context in contexts), digest)
    _write(folder / RANKINGS, (_ranking_rows(context) for context in contexts), digest)


def list_contexts(folder: Path) -> list[dict[str, Any]]:
    """Return what there is in a folder: sample_id, benchmark, task, setting, budgets and numbers of heads and tokens.

    Returns:
        A row for each context; none if the shard was made before rankings were kept.

    Raises:
        StorageError: if the file is damaged.
    """
    path = folder / CONTEXTS
    try:
        path.stat()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(path, error) from error
    return _rows(_read(path, [*_NAME, "budgets", "num_heads", "num_tokens"]))


def list_rankings(folder: Path) -> list[dict[str, Any]]:
    """Return the methods with their seeds of each context: sample_id, setting, method, seed.

    Raises:
        StorageError: if the file is missing or damaged.
    """
    return _rows(_read(folder / RANKINGS, ["sample_id", "setting", "method", "seed"]))


def read_context(
    folder: Path, sample_id: str, setting: str, methods: Iterable[tuple[str, int]] | None = None
) -> StoredContext | None:
    """Read one context, or None if it is not there.

    Args:
        folder: where `write_token_ranks` wrote.
        sample_id: the sample.
        setting: its setting.
        methods: (method, seed) of the rankings that are wanted; all of them by default.

    Raises:
        StorageError: if a file is missing, damaged or of another shard.
    """
    where: list[tuple[str, str, Any]] = [("sample_id", "=", sample_id), ("setting", "=", setting)]
    contexts = _read(folder / CONTEXTS, None, where)
    if not contexts.num_rows:
        return None
    row = _rows(contexts)[0]
    heads, budgets = row["num_heads"], tuple(row["budgets"].tolist())
    wanted = None if methods is None else set(methods)
    if wanted is not None:
        where.append(("method", "in", sorted({method for method, _ in wanted})))
    stored = []
    if wanted is None or wanted:
        rankings = _read(folder / RANKINGS, None, where)
        if _digest_in(rankings.schema) != _digest_in(contexts.schema):
            raise _unreadable(folder / RANKINGS, f"it is not of the same shard as {CONTEXTS}")
        stored = _rows(rankings)
    return StoredContext(
        **{name: row[name] for name in _NAME},
        budgets=budgets,
        pieces=tuple(row["pieces"]),
        importance=_shaped(folder / CONTEXTS, row["importance"], np.float32, heads),
        rankings=tuple(
            StoredRanking(
                method=ranking["method"],
                seed=ranking["seed"],
                ranks=_shaped(folder / RANKINGS, ranking["ranks"], np.int32, heads),
                kept=_shaped(folder / RANKINGS, ranking["kept"], np.int32, len(budgets)),
            )
            for ranking in stored
            if wanted is None or (ranking["method"], ranking["seed"]) in wanted
        ),
    )


def is_whole(folder: Path) -> bool:
    """Whether both files can be read and hold what was written."""
    try:
        names = list_contexts(folder)
        contexts = [read_context(folder, row["sample_id"], row["setting"]) for row in names]
        digest = digest_of(context for context in contexts if context is not None)
        return {_digest_in(_read(folder / name, []).schema) for name in (CONTEXTS, RANKINGS)} == {digest}
    except (StorageError, OSError, ValueError):  # a file that is lost is an OSError, one that is cut a ValueError
        return False


def _context_row(context: StoredContext) -> dict[str, Any]:
    heads, tokens = context.importance.shape
    return context.name | {
        "budgets": list(context.budgets),
        "num_heads": heads,
        "num_tokens": tokens,
        "pieces": list(context.pieces),
        "importance": context.importance.ravel(),
    }


def _ranking_rows(context: StoredContext) -> list[dict[str, Any]]:
    return [
        context.name
        | {"method": ranking.method, "seed": ranking.seed, "ranks": ranking.ranks.ravel(), "kept": ranking.kept.ravel()}
        for ranking in context.rankings
    ]


def _schema(file_name: str, digest: str) -> Any:
    import pyarrow as pa

    kinds: Mapping[str, Any] = {
        "budgets": pa.list_(pa.int32()),
        "num_heads": pa.int32(),
        "num_tokens": pa.int32(),
        "seed": pa.int64(),
        "pieces": pa.list_(pa.string()),
        "importance": pa.list_(pa.float32()),
        "ranks": pa.list_(pa.int32()),
        "kept": pa.list_(pa.int32()),
    }
    columns = [(name, kinds.get(name, pa.string())) for name in _COLUMNS[file_name]]
    return pa.schema(columns, metadata={_DIGEST: digest})


def _write(path: Path, groups: Iterable[list[dict[str, Any]]], digest: str) -> None:
    """Write groups of rows, a row group each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draft, schema = path.with_name(f".{path.name}-{uuid.uuid4().hex}"), _schema(path.name, digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks repeat, so that a dictionary makes them short; shares of attention do not, but their bytes do.
        encoding = {"use_dictionary": _REPEATED, "use_byte_stream_split": ["importance.list.element"]}
        with pq.ParquetWriter(draft, schema, compression="zstd", write_page_checksum=True, **encoding) as writer:
            for rows in groups:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        draft.replace(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot write {path}: {one_line(error)}") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _read(path: Path, columns: Sequence[str] | None, where: Sequence[tuple[str, str, Any]] | None = None) -> pa.Table:
    """Some rows and columns, all by default; pages that are not as they were written are refused."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(_COLUMNS[path.name] if columns is None else columns)
    try:
        return pq.read_table(path, columns=names, filters=list(where or []) or None, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise _unreadable(path, "it is lost") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, reason: str | Exception) -> StorageError:
    words, remedy = (reason, "") if isinstance(reason, str) else (one_line(reason), remedy_for(reason))
    remedy = remedy or "; delete what is left of it and run `kvp evaluate` again"
    return StorageError(f"cannot read {path}: {words}{remedy}")


def _shaped(path: Path, values: Any, dtype: type, num_rows: int) -> Any:
    array: Any = np.array(values, dtype=dtype)
    if num_rows < 1 or array.size % num_rows:
        raise _unreadable(path, f"it has {array.size} numbers for {num_rows} rows")
    return array.reshape(num_rows, -1)


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    return [{name: _plain(table[name], place) for name in table.column_names} for place in range(table.num_rows)]


def _plain(column: Any, place: int) -> Any:
    """One value; a list of numbers as an array, which a list of a million Python numbers would be slow for."""
    import pyarrow as pa

    value = column[place]
    if pa.types.is_list(value.type) and not pa.types.is_string(value.type.value_type):
        return value.values.to_numpy(zero_copy_only=False)
    return value.as_py()


def _digest_in(schema: pa.Schema) -> str:
    return str((schema.metadata or {}).get(_DIGEST.encode(), b"").decode(errors="replace"))
