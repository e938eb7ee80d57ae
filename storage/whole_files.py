"""Files that are written whole or not at all."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a draft to write, which takes the place of a file at the end of the block: readers find the old or the new.

    Yields:
        A path beside the file.
    """
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file in one step, and return where it is."""
    with replaced(path) as draft:
        draft.write_bytes(content)
    return path
