"""Strings that needles are made of: numbers, uuids, words, coded words and variable names, each owned by one split.

Train, validation and test must never share a needle or a key. Every drawn string therefore belongs to exactly one
split, by a hash of the string itself, and a draw is repeated until its split is the wanted one. Nothing is stored, the
pools stay practically endless, and no split can be told by looking at its strings (as it could with ranges of numbers).

Words come from the lists of the `wonderwords` package, as in RULER. Only plain lower-case words are used, and none
from its list of profanities.
"""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from itertools import islice
from random import Random

from kvpolicy.benchmarks.splits import check_split, split_of, stable_seed


class Draw:
    """The randomness of one sample: named, independent streams that only yield what the sample's split owns.

    A stream depends on the seed and its name, never on what other streams gave out, so a sample can be written at
    several sizes with the same needles.

    Attributes:
        seed: Seed of the sample.
        split: Split that must own every drawn string.
    """

    def __init__(self, *, seed: int, split: str) -> None:
        check_split(split)
        self.seed = seed
        self.split = split

    def rng(self, name: str) -> Random:
        """A fresh generator for the stream `name`."""
        return Random(stable_seed(self.seed, name))

    def stream(self, kind: str, name: str) -> Iterator[str]:
        """Endless distinct strings of a kind, all owned by the split.

        Args:
            kind: `word` (adjective-noun), `number` (7 digits), `value` (5 digits), `uuid`, `code` (6 letters),
                `variable` (5 capitals) or `example_variable` (3 capitals).
            name: Name of the stream.
        """
        rng = self.rng(f"{kind}:{name}")
        make = _MAKERS[kind]
        seen: set[str] = set()
        while True:
            text = make(rng)
            if text not in seen and split_of(text) == self.split:
                seen.add(text)
                yield text

    def take(self, kind: str, name: str, count: int) -> list[str]:
        """The first `count` strings of a stream."""
        return list(islice(self.stream(kind, name), count))


@cache
def single_words(split: str) -> tuple[str, ...]:
    """The nouns, adjectives and verbs that a split owns, sorted."""
    every = {word for part in ("noun", "adjective", "verb") for word in _word_list(part)}
    return tuple(sorted(word for word in every if split_of(word) == split))


@cache
def _word_list(part: str) -> tuple[str, ...]:
    """Plain words of a part of speech, sorted."""
    lists = files("wonderwords.assets")
    profane = set(lists.joinpath("profanitylist.txt").read_text(encoding="utf-8").split("\n"))
    words = lists.joinpath(f"{part}list.txt").read_text(encoding="utf-8").split("\n")
    plain = {word.strip() for word in words} - profane
    return tuple(sorted(word for word in plain if word.isascii() and word.isalpha() and word.islower()))


def _digits(count: int) -> Callable[[Random], str]:
    return lambda rng: str(rng.randrange(10 ** (count - 1), 10**count))


def _letters(alphabet: str, count: int) -> Callable[[Random], str]:
    return lambda rng: "".join(rng.choices(alphabet, k=count))


def _word_pair(rng: Random) -> str:
    return f"{rng.choice(_word_list('adjective'))}-{rng.choice(_word_list('noun'))}"


_MAKERS: dict[str, Callable[[Random], str]] = {
    "word": _word_pair,
    "number": _digits(7),
    "value": _digits(5),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    "code": _letters(string.ascii_lowercase, 6),
    "variable": _letters(string.ascii_uppercase, 5),
    "example_variable": _letters(string.ascii_uppercase, 3),
}
