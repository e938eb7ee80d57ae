"""Digests of files, by which models and policies are told from others and from damaged copies."""

import hashlib
from pathlib import Path


def digest_file(path: Path) -> str:
    """SHA-256 of a file as hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
