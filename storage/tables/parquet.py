"""Small tables of plain rows as Parquet files: prompts and the scores of a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpolicy.digests import digest_json
from kvpolicy.errors import InputError, first_line
from storage.errors import StorageError
from storage.whole_files import replaced

if TYPE_CHECKING:
    import pyarrow as pa

_DIGEST = "rows_sha256"  # in the file's metadata: Parquet itself checks neither names nor, by default, values


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows to a file that appears only when it is complete, and return the digest of their content.

    Args:
        path: The file; one that is there is replaced.
        rows: All with the same columns of plain values or lists of them; none are fine.

    Raises:
        StorageError: If they cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = [dict(row) for row in rows]
    for index, row in enumerate(plain):
        # Arrow takes the columns from the first row: it would drop others, and fill in what is missing.
        if row.keys() != plain[0].keys():
            differing = ", ".join(sorted(map(str, row.keys() ^ plain[0].keys())))
            raise StorageError(f"cannot write {path}: row {index} differs from the first in having {differing} or not")
    try:
        digest = digest_json(plain)
        table = pa.Table.from_pylist(plain).replace_schema_metadata({_DIGEST: digest})
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as draft:
            pq.write_table(table, draft, compression="zstd")
    except (OSError, OverflowError, pa.ArrowException, InputError) as error:
        raise StorageError(f"cannot write {path}: {first_line(error)}") from error
    return digest


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file that `write_rows` wrote.

    Raises:
        StorageError: If it is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        rows: list[dict[str, Any]] = table.to_pylist()
        expected = (table.schema.metadata or {}).get(_DIGEST.encode(), b"").decode()
        if digest_json(rows) != expected:
            raise StorageError("damaged, its content is not what was written")
    except (OSError, ValueError, pa.ArrowException, StorageError) as error:
        raise StorageError(
            f"cannot read {path}: {first_line(error)}; delete what is left of it and run the same command again"
        ) from error
    return rows


def columns_of(path: Path) -> list[pa.Field]:
    """Columns of a file with their types; none if it is lost or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path))
    except (OSError, pa.ArrowException):
        return []
