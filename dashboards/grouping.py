"""Rows of the catalog by what they have in common."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import itemgetter
from typing import Any, TypeVar

Row = Mapping[str, Any]
Place = tuple[str, str]
"""A benchmark and a setting, which no figure mixes."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

place_of: Callable[[Row], Place] = itemgetter("benchmark", "setting")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, groups and items in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
