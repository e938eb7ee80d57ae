"""Content digests: the names by which everything in the stores is known.

Not for checksums of stored chunks (the trace store's codecs carry those). Standard library only, so that importing
it costs nothing.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpolicy.errors import InputError

_SHORT_HEX = 16


def digest_bytes(content: bytes) -> str:
    """Return the sha256 of ``content`` as 64 hexadecimal characters."""
    return hashlib.sha256(content).hexdigest()


def digest_json(value: Any) -> str:
    """Digest a JSON value in canonical form: sorted keys, no spaces, tuples as lists.

    Raises:
        InputError: If the value holds anything that JSON would bend: other types, keys that are not text, NaN.
    """
    return digest_bytes(canonical_json(value).encode())


def canonical_json(value: Any) -> str:
    """Return the one JSON text of ``value`` that is digested and stored.

    Raises:
        InputError: As `digest_json`.
    """
    _check_json(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _check_json(value: Any, path: str) -> None:
    # json.dumps would turn the key 1 into "1" and fail without a place on the rest, so look first.
    if value is None or isinstance(value, (bool, int, str)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{path} is {value}: only finite numbers can be digested and stored; leave it out")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InputError(f"{path} has the key {key!r} of type {type(key).__name__}: expected text keys")
            _check_json(item, f"{path}.{key}")
    else:
        raise InputError(f"{path} is a {type(value).__name__}: expected null, bool, number, text, list or object")


def digest_file(path: Path) -> str:
    """Digest the bytes of a file without holding them all, with whatever OSError that raises."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_folder(root: Path) -> str:
    """Digest the relative names and contents of all files under a folder, wherever it lies and whatever its times.

    Raises:
        InputError: If the folder does not exist or a file cannot be read.
    """
    if not root.is_dir():
        raise InputError(f"no folder at {root}: expected one to digest")
    try:
        files = {item.relative_to(root).as_posix(): digest_file(item) for item in root.rglob("*") if item.is_file()}
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error
    return digest_json(files)


def short_id(kind: str, digest: str) -> str:
    """Return the id of content: its kind and the first 16 characters of its digest."""
    return f"{kind}-{digest[:_SHORT_HEX]}"
