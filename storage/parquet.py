"""Small tables of plain rows as Parquet files: prompts and the scores of a shard."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.digests import digest_json
from storage.errors import StorageError


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows to a file that appears only when it is complete, and return the digest of their content.

    Args:
        path: The file; one that is there is replaced.
        rows: At least one; all with the same columns of plain values or lists of them.

    Raises:
        StorageError: If there are no rows, or they cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not rows:
        raise StorageError(f"no rows to write to {path}")
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), draft, compression="zstd")
        draft.replace(path)
    except (OSError, pa.ArrowException) as error:
        draft.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error}") from error
    return digest_json([dict(row) for row in rows])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file that `write_rows` wrote.

    Raises:
        StorageError: If it is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"cannot read {path}: {error}; run the stage that makes it again") from error
    return rows
