"""Model folders that are made here: one appears only when it is complete, and later it is told if it was damaged."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError

RECORD = "sha256.json"
# What of a folder or a repository belongs to a model: weights, configuration and tokenizer.
CONTENT_SUFFIXES = frozenset({".safetensors", ".json", ".model", ".txt", ".jinja", ".bin"})


@contextmanager
def new_model_folder(folder: Path) -> Iterator[Path]:
    """Give a draft to fill, which becomes `folder` at the end of the block, with the SHA-256 of every file beside them.

    Whoever is killed leaves a hidden draft alone. Two processes may make the same folder at once: the first to finish
    wins.

    Yields:
        An empty folder on the same file system.

    Raises:
        InputError: If it cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            yield draft
            record = {path.name: digest_file(path) for path in sorted(draft.iterdir())}
            (draft / RECORD).write_text(json.dumps(record, indent=1))
            try:
                os.rename(draft, folder)  # noqa: PTH104  # Path.rename would be the same; atomic on one file system
            except OSError:
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"model folder {folder} cannot be written ({error.strerror or error}): make room, or set KVP_CACHE"
        ) from error


def check_recorded_digests(folder: Path) -> None:
    """Compare a folder that was made here with the digests recorded beside it; a folder without a record passes.

    Raises:
        InputError: If a file is missing or was changed since it was made.
    """
    record = folder / RECORD
    if not record.exists():
        return
    try:
        digests = dict(json.loads(record.read_text()))
        damaged = [folder / name for name, expected in digests.items() if not _has_digest(folder / name, expected)]
    except (ValueError, TypeError):
        digests, damaged = {}, [record]
    if damaged or not digests:
        raise InputError(
            f"model file {(damaged or [record])[0]} does not match its recorded SHA-256 (damaged or changed): "
            f"delete the folder {folder} and run again to make it anew"
        )


def _has_digest(path: Path, expected: str) -> bool:
    return path.is_file() and digest_file(path) == expected
