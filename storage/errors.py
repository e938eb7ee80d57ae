"""The error that callers of the stores see, and what to do about errors of places."""

from __future__ import annotations

import re

# Statuses with the reason behind them, and no part of a path: digests and checksums have such digits as well.
_REMEDIES = (
    (
        r"AccessDenied|\b403 Forbidden|Unauthenticated|InvalidAccessKeyId",
        "check the AWS_* credentials and their rights",
    ),
    (r"NoSuchBucket|\b404 Not Found", "make the bucket, or name another place"),
    (
        r"error sending request|(?<![/\w])credential",
        "check AWS_ENDPOINT_URL, AWS_REGION, the AWS_* credentials and the network",
    ),
    (
        r"SlowDown|\b503 Service Unavailable|\b429 Too Many",
        "the object store is overloaded: run the same command again later",
    ),
    ("Permission denied|Read-only file system", "make it readable and writable, or use another --home"),
    ("No space left", "make room, then run the same command again"),
)


class StorageError(Exception):
    """A store that cannot serve the call: one line that says what, where and what to do."""


def remedy_for(error: BaseException) -> str:
    """Return "; what to do" for an error of a place, as far as its text tells."""
    text = str(error)
    return next((f"; {remedy}" for signs, remedy in _REMEDIES if re.search(signs, text)), "")
