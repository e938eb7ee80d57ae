"""Rankings of contexts token by token, as two Parquet files in the folder of an evaluation shard.

`contexts.parquet` has a row for each context: the text of its tokens, and what the future pays each of them in every
head. `rankings.parquet` has a row for each ranking of a context, which another folder may have: a shard of one method
has that method's rankings alone. Both have a row group for each row, so that one is read without the others. Arrays lie
flat, heads one after the other; Parquet packs ranks into as many bits as the length of the context needs (90 heads, 900
tokens: about 100 KB a ranking).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpolicy.errors import first_line
from storage.errors import StorageError, remedy_for
from storage.whole_files import replaced

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

CONTEXTS, RANKINGS = "contexts.parquet", "rankings.parquet"
_DIGEST = "content_sha256"
_NAME = ("sample_id", "benchmark", "task", "setting")
_CONTEXT_NAME = ("sample_id", "setting")
_REPEATED = ["ranks.list.element", "kept.list.element", "pieces.list.element"]
_COLUMNS = {
    CONTEXTS: (*_NAME, "budgets", "num_heads", "num_tokens", "pieces", "importance"),
    RANKINGS: (*_CONTEXT_NAME, "method", "seed", "num_heads", "ranks", "kept"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredRanking:
    """The order in which one method gives up the tokens of a context.

    Attributes:
        sample_id: the sample.
        setting: query_aware or query_agnostic.
        method: the method.
        seed: its seed.
        ranks: (head, token) from 1, kept longest; a head that keeps b tokens keeps ranks 1 to b.
        kept: (budget, head) tokens that a head keeps at each of the context's budgets.
    """

    sample_id: str
    setting: str
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
        rankings: those that were read with it.
    """

    sample_id: str
    benchmark: str
    task: str
    setting: str
    budgets: tuple[int, ...]
    pieces: tuple[str, ...]
    importance: npt.NDArray[np.float32]
    rankings: tuple[StoredRanking, ...] = ()

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

    def find(self, method: str, seed: int) -> StoredRanking | None:
        """The ranking of a method, if it was read."""
        return next((ranking for ranking in self.rankings if (ranking.method, ranking.seed) == (method, seed)), None)


def digest_of(contexts: Iterable[StoredContext], rankings: Iterable[StoredRanking]) -> str:
    """Return the digest of the content of some contexts, apart from rankings read with them, and of some rankings."""
    hasher = hashlib.sha256()
    for context in contexts:
        for text in (*(getattr(context, name) for name in _NAME), *context.pieces):
            hasher.update(f"{len(text)} {text}".encode())
        hasher.update(np.asarray(context.budgets, dtype="<i8").tobytes())
        hasher.update(np.ascontiguousarray(context.importance, dtype="<f4").tobytes())
    for ranking in rankings:
        for text in (ranking.sample_id, ranking.setting, ranking.method):
            hasher.update(f"{len(text)} {text}".encode())
        hasher.update(f"{ranking.seed} {ranking.ranks.shape}".encode())
        hasher.update(np.ascontiguousarray(ranking.ranks, dtype="<i4").tobytes())
        hasher.update(np.ascontiguousarray(ranking.kept, dtype="<i4").tobytes())
    return hasher.hexdigest()


def write_token_ranks(folder: Path, contexts: Sequence[StoredContext], rankings: Sequence[StoredRanking]) -> None:
    """Write both files; each appears when it is complete, and replaces one that is there.

    Args:
        folder: where they go; it is made if it is missing.
        contexts: without the rankings that were read with them; none are fine: the file then says that there are none.
        rankings: of these contexts or of those in another folder; none are fine too.

    Raises:
        StorageError: if they cannot be written.
    """
    digest = digest_of(contexts, rankings)
    _write(folder / CONTEXTS, map(_context_row, contexts), digest)
    _write(folder / RANKINGS, map(_ranking_row, rankings), digest)


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
    return _rows(_read(folder / RANKINGS, [*_CONTEXT_NAME, "method", "seed"]))


def read_context(
    folder: Path, sample_id: str, setting: str, rankings: Mapping[tuple[str, int], Path]
) -> StoredContext | None:
    """Read one context, or None if it is not there.

    Args:
        folder: where `write_token_ranks` wrote the context.
        sample_id: the sample.
        setting: its setting.
        rankings: (method, seed) of the rankings that are wanted, and the folder of each; one that is not there is
            left out.

    Raises:
        StorageError: if a file is missing or damaged, or a ranking is of another context.
    """
    where: list[tuple[str, str, Any]] = [("sample_id", "=", sample_id), ("setting", "=", setting)]
    contexts = _rows(_read(folder / CONTEXTS, None, where))
    if not contexts:
        return None
    wanted = (
        (ranked / RANKINGS, [*where, ("method", "=", method), ("seed", "=", seed)])
        for (method, seed), ranked in rankings.items()
    )
    stored = (_stored_ranking(path, row) for path, rows in wanted for row in _rows(_read(path, None, rows)))
    return replace(_stored_context(folder / CONTEXTS, contexts[0]), rankings=tuple(stored))


def is_whole(folder: Path) -> bool:
    """Whether both files can be read and hold what was written."""
    paths = {name: folder / name for name in (CONTEXTS, RANKINGS)}
    try:
        tables = {name: _read(path, None) for name, path in paths.items()}
        digest = digest_of(
            (_stored_context(paths[CONTEXTS], row) for row in _rows(tables[CONTEXTS])),
            (_stored_ranking(paths[RANKINGS], row) for row in _rows(tables[RANKINGS])),
        )
        return {_digest_in(table.schema) for table in tables.values()} == {digest}
    except (StorageError, OSError, ValueError):  # a file that is lost is an OSError, one that is cut a ValueError
        return False


def _context_row(context: StoredContext) -> dict[str, Any]:
    heads, tokens = context.importance.shape
    return {name: getattr(context, name) for name in _NAME} | {
        "budgets": list(context.budgets),
        "num_heads": heads,
        "num_tokens": tokens,
        "pieces": list(context.pieces),
        "importance": context.importance.ravel(),
    }


def _ranking_row(ranking: StoredRanking) -> dict[str, Any]:
    names = {name: getattr(ranking, name) for name in (*_CONTEXT_NAME, "method", "seed")}
    arrays = {"ranks": ranking.ranks.ravel(), "kept": ranking.kept.ravel()}
    return {**names, "num_heads": len(ranking.ranks), **arrays}


def _stored_context(path: Path, row: Mapping[str, Any]) -> StoredContext:
    return StoredContext(
        **{name: row[name] for name in _NAME},
        budgets=tuple(row["budgets"].tolist()),
        pieces=tuple(row["pieces"]),
        importance=_shaped(path, row["importance"], np.float32, row["num_heads"], -1),
    )


def _stored_ranking(path: Path, row: Mapping[str, Any]) -> StoredRanking:
    return StoredRanking(
        **{name: row[name] for name in (*_CONTEXT_NAME, "method", "seed")},
        ranks=_shaped(path, row["ranks"], np.int32, row["num_heads"], -1),
        kept=_shaped(path, row["kept"], np.int32, -1, row["num_heads"]),
    )


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


def _write(path: Path, rows: Iterable[dict[str, Any]], digest: str) -> None:
    """Write rows, a row group each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(path.name, digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks repeat, so that a dictionary makes them short; shares of attention do not, but their bytes do.
        encoding = {"use_dictionary": _REPEATED, "use_byte_stream_split": ["importance.list.element"]}
        with (
            replaced(path) as draft,
            pq.ParquetWriter(draft, schema, compression="zstd", write_page_checksum=True, **encoding) as writer,
        ):
            for row in rows:
                writer.write_table(pa.Table.from_pylist([row], schema=schema))
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot write {path}: {first_line(error)}") from error


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
    words, remedy = (reason, "") if isinstance(reason, str) else (first_line(reason), remedy_for(reason))
    remedy = remedy or "; delete what is left of it and run `kvp evaluate` again"
    return StorageError(f"cannot read {path}: {words}{remedy}")


def _shaped(path: Path, values: Any, dtype: type, *shape: int) -> Any:
    try:
        return np.array(values, dtype=dtype).reshape(shape)
    except ValueError as error:
        raise _unreadable(path, f"it has {len(values)} numbers for a shape of {shape}") from error


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
