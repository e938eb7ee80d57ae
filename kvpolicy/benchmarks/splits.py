"""Train, validation and test: which of them owns a text, and the seeds of what is drawn for one.

Ownership is a hash of the text itself, so that it is the same on every machine, in every release and in whatever order
files are read. A public file that is a split of its own is shared out in the same way: policies are trained on one
part of it and evaluated on another, and no two parts share anything that can be traced.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS

_OWNERS = ("train", "train", "validation", "test")  # by bucket: half, a quarter, a quarter

Item = TypeVar("Item")


def check_split(split: str) -> None:
    """Raises an `InputError` unless `split` is one of `SPLITS`."""
    if split not in SPLITS:
        raise InputError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")


def split_of(text: str) -> str:
    """The split that owns a string; the same on every machine and in every release."""
    return _OWNERS[hashlib.blake2b(text.encode(), digest_size=1, person=b"kvp-ruler-split").digest()[0] % 4]


def share_out(
    items: Iterable[Item], *, owner: Callable[[Item], str], parts: Callable[[Item], Iterable[str]]
) -> tuple[dict[str, list[Item]], int]:
    """Give every item to a split.

    Args:
        items: What is shared out.
        owner: The text of an item whose hash decides.
        parts: The texts of an item by which it could be recognised in another split.

    Returns:
        The items of each split, in their order, and how many were left out because they have a part in common with an
        item of another split.
    """
    held: dict[str, list[tuple[Item, frozenset[str]]]] = {split: [] for split in SPLITS}
    for item in items:
        held[split_of(owner(item))].append((item, frozenset(parts(item))))
    shared = in_several({part for _, owned in listed for part in owned} for listed in held.values())
    kept = {split: [item for item, owned in listed if not owned & shared] for split, listed in held.items()}
    return kept, sum(map(len, held.values())) - sum(map(len, kept.values()))


def in_several(sets: Iterable[set[str]]) -> set[str]:
    """Members of more than one set."""
    counts = Counter(member for members in sets for member in members)
    return {member for member, count in counts.items() if count > 1}


def stable_seed(*parts: object) -> int:
    """A 128-bit seed from any printable values; the same on every machine."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:16])
