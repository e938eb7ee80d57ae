"""Model folders: which of their files are a model, and those made here, which appear complete and are checked later."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError

RECORD = "sha256.json"
TEMPLATES = "additional_chat_templates"
# Files of a folder or a repository that belong to a model: weights, configuration, tokenizer and its templates. They
# are all that transformers reads of a folder without running code (a test goes through its tokenizers).
CONTENT_PATTERNS = (
    *("*.safetensors", "*.bin", "*.json", "*.jinja", "*.txt"),
    *("*.model", "*.model.*", "*.spm", "*.tiktoken", "*.tokenizer", "*.codes"),
)


def is_content(name: str) -> bool:
    """Whether a file, by its path in a model folder, belongs to the model."""
    folder, _, file = name.rpartition("/")
    is_there = not folder or (folder == TEMPLATES and file.endswith(".jinja"))
    return is_there and file != RECORD and any(fnmatchcase(file, pattern) for pattern in CONTENT_PATTERNS)


def content_files(folder: Path) -> list[str]:
    """Files of a folder that are the model, as paths in it, sorted: what transformers reads, and a digest covers."""
    return [name for name in _files(folder) if is_content(name)]


def _files(folder: Path) -> list[str]:
    """Files in a folder and in its folder of templates, as paths in it, sorted."""
    paths = [*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")]
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())


@contextmanager
def new_model_folder(folder: Path) -> Iterator[Path]:
    """Give a draft to fill, which becomes `folder` at the end of the block, with the SHA-256 of every file beside them.

    A killed process leaves only a hidden draft. Two processes may make the same folder at once: the first to finish
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
            record = {name: digest_file(draft / name) for name in _files(draft)}
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
    except (ValueError, TypeError, RecursionError):
        digests, damaged = {}, [record]
    if damaged or not digests:
        raise InputError(
            f"model file {(damaged or [record])[0]} does not match its recorded SHA-256 (damaged or changed): "
            f"delete the folder {folder} and run again to make it anew"
        )


def _has_digest(path: Path, expected: str) -> bool:
    return path.is_file() and digest_file(path) == expected
