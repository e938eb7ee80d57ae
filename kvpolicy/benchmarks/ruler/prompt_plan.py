"""A prompt whose haystack can be written at any size, and the search for the size that fills a length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything random about one sample is decided; only the size of the haystack is open.

    Attributes:
        write: Makes the text fields of a `kvpolicy.text.sample.Sample`, by name, with a number of units of haystack. A
            pure function: the same size gives the same text, whatever was written before.
        smallest: Units of haystack that the task needs at least.
        largest: Units that there are, or None where the haystack is endless.
    """

    write: Callable[[int], Mapping[str, Any]]
    smallest: int = 1
    largest: int | None = None


class Lazy:
    """The items of an iterator, drawn once and only as far as they are asked for."""

    def __init__(self, items: Iterator[str]) -> None:
        self._items = items
        self._drawn: list[str] = []

    def first(self, count: int) -> list[str]:
        """The first `count` items, or all where there are fewer."""
        self._drawn.extend(islice(self._items, max(0, count - len(self._drawn))))
        return self._drawn[:count]


def largest_fitting(
    tokens_of: Callable[[int], int], *, budget: int, smallest: int, largest: int | None = None
) -> int | None:
    """The size whose text fits a token budget while one unit more does not.

    Tokenising is what costs, so the size is predicted from the tokens per unit seen so far (the secant), corrected
    until the bracket closes, and halved only if that is slow. Token counts are nearly, not strictly, monotone in the
    size (a needle may move); the answer always fits.

    Args:
        tokens_of: Tokens of the text with a number of units.
        budget: Tokens that the text may have.
        smallest: Units at least.
        largest: Units at most, or None.

    Returns:
        The size, or None where not even the smallest fits.
    """
    low, low_tokens = smallest, tokens_of(smallest)
    if low_tokens > budget:
        return None
    first_tokens = low_tokens
    high = None if largest is None else largest + 1  # the smallest size known, or defined, not to fit
    guess = low + 8
    for step in range(200):
        if high is not None:
            if low + 1 >= high:
                break
            if step > 8:
                guess = (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
        tokens = tokens_of(guess)
        if tokens <= budget:
            low, low_tokens = guess, tokens
            per_unit = (tokens - first_tokens) / (guess - smallest)
        else:
            high = guess
            per_unit = (tokens - low_tokens) / (guess - low)
        guess = low + int((budget - low_tokens) / max(per_unit, 1e-3))
        if high is None:
            guess = max(guess, low + 1)
    return low
