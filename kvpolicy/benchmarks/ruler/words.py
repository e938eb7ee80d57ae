"""The two aggregation tasks of RULER: common words (cwe) and frequent coded words (fwe).

They follow NVIDIA/RULER, `scripts/data/synthetic/common_words_extraction.py` and `freq_words_extraction.py`.

cwe: a numbered list in which ten words come 30 times and all others 3 times; in lengths below 4,096 tokens 6 and 1
times. A worked example with a shorter list precedes it (20 words, 3 and 1 times; from 4,096 tokens on 40 words, 10 and
3 times). Departures: below the length that holds both, the example is left out; the words of the example do not come
again in the list; and once a split's single words are used up, adjective-noun pairs follow (there: a second word list).

fwe: coded words of six letters whose counts follow Zipf's law with alpha 2, N · r^-2 / ζ(2) for rank r, in random
order. The first rank is written `...` and is noise; ranks 2 to 4 are asked for. N is the unit of the haystack, and it
is never so small that the fourth rank ties with the fifth (there: it may).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import Any

from kvpolicy.benchmarks.ruler.prompt_plan import Lazy, Plan
from kvpolicy.benchmarks.ruler.vocabulary import Draw, single_words

NUM_COMMON = 10
_LONG_LIST_TOKENS = 4096
_MASK = 2**64 - 1
_SMALLEST_LIST = 12  # distinct words: the common ones and two others
_UNTIED_WORDS = 53  # from here on the counts of ranks 2 to 5 always differ

_CWE_INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often."
)
_CWE_QUESTION = "Question: What are the 10 most common words in the above list?"
_CWE_PREFIX = "Answer: The top 10 words that appear most often in the list are:"


class _Order:
    """A random order of (item, repetition) pairs that shorter and longer lists share."""

    def __init__(self, rng: Random) -> None:
        self._seed = rng.getrandbits(64)

    def shuffled(self, counts: Sequence[tuple[str, int]]) -> list[str]:
        """Every word as often as its count says, in random order."""
        keyed = [
            (self._key(item, repetition), word)
            for item, (word, count) in enumerate(counts)
            for repetition in range(count)
        ]
        return [word for _, word in sorted(keyed)]

    def _key(self, item: int, repetition: int) -> int:
        """64 well mixed bits (the finaliser of SplitMix64; Steele et al., OOPSLA 2014)."""
        bits = (self._seed + (item << 32 | repetition) * 0x9E3779B97F4A7C15) & _MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
        return bits ^ bits >> 31


def plan_common_words(draw: Draw, *, length_tokens: int) -> list[Plan]:
    """Draws a sample's words: with the worked example, and for short lengths without.

    A unit of haystack is a distinct word of the list; the first ten are the common ones.
    """
    long = length_tokens >= _LONG_LIST_TOKENS
    example_size, example_repetitions = (40, (10, 3)) if long else (20, (3, 1))
    stream = _distinct_words(draw)
    example_words = list(islice(stream, example_size))
    listed, common = _word_list(example_words, example_repetitions, _Order(draw.rng("example order")))
    example = f"{_CWE_INSTRUCTION}\n{listed}\n{_CWE_QUESTION} {_CWE_PREFIX} {_numbered(common)}\n"
    words = Lazy(stream)
    order = _Order(draw.rng("order"))

    def write(shown: str, size: int) -> Mapping[str, Any]:
        listed, common = _word_list(words.first(size), (30, 3) if long else (6, 1), order)
        return {
            "context": f"{shown}{_CWE_INSTRUCTION}\n{listed}\n",
            "question": _CWE_QUESTION,
            "answer_prefix": _CWE_PREFIX,
            "answer": f" {_numbered(common)}",
            "references": tuple(common),
        }

    return [Plan(write=partial(write, shown), smallest=_SMALLEST_LIST) for shown in (example, "")]


def _distinct_words(draw: Draw) -> Iterator[str]:
    words = list(single_words(draw.split))
    draw.rng("words").shuffle(words)
    yield from words
    yield from draw.stream("word", "more words")


def _word_list(words: Sequence[str], repetitions: tuple[int, int], order: _Order) -> tuple[str, list[str]]:
    """The numbered list and its common words, in the order in which they first appear."""
    often, seldom = repetitions
    shuffled = order.shuffled([(word, often if rank < NUM_COMMON else seldom) for rank, word in enumerate(words)])
    common = set(words[:NUM_COMMON])
    return _numbered(shuffled), [word for word in dict.fromkeys(shuffled) if word in common]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def plan_frequent_words(draw: Draw, *, length_tokens: int) -> Plan:
    """Draws a sample's coded words: one per 50 tokens of the length, as in RULER, and at least ten.

    A unit of haystack is one of the N occurrences that Zipf's law shares out.
    """
    codes = ("...", *draw.take("code", "words", max(10, length_tokens // 50) - 1))  # by rank
    order = _Order(draw.rng("order"))
    asked = tuple(codes[1:4])

    def write(size: int) -> Mapping[str, Any]:
        head = size * 6 / math.pi**2
        shuffled = order.shuffled([(word, int(head / rank**2)) for rank, word in enumerate(codes, start=1)])
        return {
            "context": "Read the following coded text and track the frequency of each coded word. Find the three most "
            f"frequently appeared coded words. {' '.join(shuffled)}\n",
            "question": "Question: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            "answer_prefix": "Answer: According to the coded text above, the three most frequently appeared words are:",
            "answer": f" {asked[0]}, {asked[1]}, and {asked[2]}.",
            "references": asked,
        }

    return Plan(write=write, smallest=_UNTIED_WORDS)
