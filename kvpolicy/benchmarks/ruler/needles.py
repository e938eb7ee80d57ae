"""The eight needle-in-a-haystack tasks of RULER: lines that hide a value under a key, and a question for it.

Wording, units and joins follow NVIDIA/RULER, `scripts/data/synthetic/niah.py` (arXiv 2404.06654, appendix B).
Departures: needles lie at uniformly drawn depths (there: for essays, one of 40 evenly spaced ones), keys and values of
a sample are distinct, and an essay haystack starts at a drawn sentence of the split's essays and wraps around (there:
always at the first).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvpolicy.benchmarks.ruler.prompt_plan import Lazy, Parts
from kvpolicy.benchmarks.ruler.tasks import RulerTask
from kvpolicy.benchmarks.ruler.vocabulary import Draw

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def needle(kind: str, key: str, value: str) -> str:
    """The sentence that hides a value; `kind` is `number` or `uuid`."""
    return f"One of the special magic {kind}s for {key} is: {value}."


@dataclass(frozen=True, kw_only=True)
class NeedlePlan:
    """A needle task with its needles drawn.

    Attributes:
        task: Row of the table.
        keys: Keys of the needles.
        values: Values of every key.
        depths: Where each needle goes, as a share of the haystack; in the order of `needles`.
        order: Order in which the needles appear.
        queries: Keys that are asked for.
        haystack: What surrounds the needles.
    """

    task: RulerTask
    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    depths: tuple[float, ...]
    order: tuple[int, ...]
    queries: tuple[int, ...]
    haystack: NoiseLines | NeedleLines | Essay

    @property
    def smallest(self) -> int:
        """A haystack of one unit."""
        return 1

    @property
    def largest(self) -> None:
        """Every haystack is endless."""
        return None

    def write(self, size: int) -> Parts:
        """The prompt with `size` units of haystack: lines, or words of an essay."""
        kind = self.task.value_kind
        needles = [
            needle(kind, key, value) for key, values in zip(self.keys, self.values, strict=True) for value in values
        ]
        pieces = self.haystack.pieces(size)
        # From the back, so that the places of those still to come stay valid.
        for depth, index in reversed(list(zip(sorted(self.depths), self.order, strict=True))):
            pieces.insert(int(depth * (len(pieces) + 1)), needles[index])
        answers = tuple(value for index in self.queries for value in self.values[index])
        asked = _listed([self.keys[index] for index in self.queries])
        one = len(answers) == 1
        some, hidden, asks, be = (
            ("A", f"{kind} is", "What is the", "is") if one else ("Some", f"{kind}s are", "What are all the", "are")
        )
        name = kind if one else f"{kind}s"
        return Parts(
            context=f"{some} special magic {hidden} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {name} afterwards.\n{self.haystack.joint.join(pieces)}\n",
            question=f"{asks} special magic {name} for {asked} mentioned in the provided text?",
            answer_prefix=f"The special magic {name} for {asked} mentioned in the provided text {be}",
            answer=f" {_listed(answers)}.",
            references=answers,
        )


def plan_needles(task: RulerTask, draw: Draw, essay_sentences: Sequence[str]) -> NeedlePlan:
    """Draws the needles of a sample.

    Args:
        task: A row of kind `niah`.
        draw: Randomness of the sample.
        essay_sentences: The sentences of the split, for essay haystacks.
    """
    keys = draw.take(task.key_kind, "keys", task.num_keys)
    values = draw.take(task.value_kind, "values", task.num_keys * task.num_values)
    rng = draw.rng("places")
    haystack: NoiseLines | NeedleLines | Essay
    if task.haystack == "noise":
        haystack = NoiseLines()
    elif task.haystack == "needles":
        others = (
            needle(task.value_kind, key, value)
            for key, value in zip(
                draw.stream(task.key_kind, "other keys"), draw.stream(task.value_kind, "other values"), strict=False
            )
            if key not in keys and value not in values
        )
        haystack = NeedleLines(Lazy(others))
    else:
        haystack = Essay(essay_sentences, start=draw.rng("essay").randrange(len(essay_sentences)))
    per_key = task.num_values
    return NeedlePlan(
        task=task,
        keys=tuple(keys),
        values=tuple(tuple(values[i * per_key : (i + 1) * per_key]) for i in range(task.num_keys)),
        depths=tuple(rng.random() for _ in values),
        order=tuple(rng.sample(range(len(values)), len(values))),
        queries=tuple(rng.sample(range(task.num_keys), task.num_queries)),
        haystack=haystack,
    )


class NoiseLines:
    """The same five short sentences, a line a unit."""

    joint = "\n"

    def pieces(self, size: int) -> list[str]:
        """`size` lines."""
        return [NOISE] * size


class NeedleLines:
    """Needles with other keys and values, a line a unit."""

    joint = "\n"

    def __init__(self, needles: Lazy) -> None:
        self._needles = needles

    def pieces(self, size: int) -> list[str]:
        """`size` lines."""
        return list(self._needles.first(size))


class Essay:
    """Prose from a starting sentence on, a word a unit; the last sentence is cut where the words end."""

    joint = " "

    def __init__(self, sentences: Sequence[str], *, start: int) -> None:
        self._sentences = [*sentences[start:], *sentences[:start]]
        self._words_until = list(accumulate(len(sentence.split()) for sentence in self._sentences))

    def pieces(self, size: int) -> list[str]:
        """Sentences of `size` words altogether; the text is repeated where it is shorter."""
        rounds, rest = divmod(size, self._words_until[-1])
        whole = bisect_right(self._words_until, rest)
        pieces = self._sentences * rounds + self._sentences[:whole]
        cut = rest - (self._words_until[whole - 1] if whole else 0)
        if cut:
            pieces.append(" ".join(self._sentences[whole].split()[:cut]))
        return pieces


def _listed(names: Sequence[str]) -> str:
    """`a`, or `a, and b`, as RULER lists the keys of a query."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
