"""The eight needle-in-a-haystack tasks of RULER: lines that hide a value under a key, and a question for it.

Wording, units and joins follow NVIDIA/RULER, `scripts/data/synthetic/niah.py` (arXiv 2404.06654, appendix B).
Departures: needles lie at uniformly drawn depths (there: for essays, one of 40 evenly spaced ones), keys and values of
a sample are distinct, and an essay haystack starts at a drawn sentence of the split's essays and wraps around (there:
always at the first).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any

from kvpolicy.benchmarks.ruler.prompt_plan import Lazy, Plan
from kvpolicy.benchmarks.ruler.tasks import RulerTask
from kvpolicy.benchmarks.ruler.vocabulary import Draw

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def needle(kind: str, key: str, value: str) -> str:
    """The sentence that hides a value; `kind` is `number` or `uuid`."""
    return f"One of the special magic {kind}s for {key} is: {value}."


def plan_needles(task: RulerTask, draw: Draw, essay_sentences: Sequence[str]) -> Plan:
    """Draws the needles of a sample; a unit of haystack is a line, or a word of an essay.

    Args:
        task: A row of kind `niah`.
        draw: Randomness of the sample.
        essay_sentences: The sentences of the split, for essay haystacks.
    """
    kind, per_key = task.value_kind, task.num_values
    keys = draw.take(task.key_kind, "keys", task.num_keys)
    values = draw.take(kind, "values", task.num_keys * per_key)
    pieces_of: Callable[[int], list[str]]
    if task.haystack == "noise":
        joint, pieces_of = "\n", Lazy(repeat(NOISE)).first
    elif task.haystack == "needles":
        others = zip(draw.stream(task.key_kind, "other keys"), draw.stream(kind, "other values"), strict=False)
        lines = (needle(kind, key, value) for key, value in others if key not in keys and value not in values)
        joint, pieces_of = "\n", Lazy(lines).first
    else:
        start = draw.rng("essay").randrange(len(essay_sentences))
        joint, pieces_of = " ", Essay(essay_sentences, start=start).pieces
    needles = [needle(kind, keys[place // per_key], value) for place, value in enumerate(values)]
    rng = draw.rng("places")
    depths = sorted(rng.random() for _ in values)  # shares of the haystack
    shuffled = rng.sample(needles, len(needles))
    queries = rng.sample(range(task.num_keys), task.num_queries)
    answers = tuple(value for key in queries for value in values[key * per_key : (key + 1) * per_key])
    asked = _listed([keys[key] for key in queries])
    if len(answers) == 1:
        name, some, hidden, asks, be = kind, "A", f"{kind} is", "What is the", "is"
    else:
        name, some, hidden, asks, be = f"{kind}s", "Some", f"{kind}s are", "What are all the", "are"

    def write(size: int) -> Mapping[str, Any]:
        pieces = pieces_of(size)
        # From the back, so that the places of those still to come stay valid.
        for depth, hides in reversed(list(zip(depths, shuffled, strict=True))):
            pieces.insert(int(depth * (len(pieces) + 1)), hides)
        return {
            "context": f"{some} special magic {hidden} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {name} afterwards.\n{joint.join(pieces)}\n",
            "question": f"{asks} special magic {name} for {asked} mentioned in the provided text?",
            "answer_prefix": f"The special magic {name} for {asked} mentioned in the provided text {be}",
            "answer": f" {_listed(answers)}.",
            "references": answers,
        }

    return Plan(write=write)


class Essay:
    """Prose from a starting sentence on, a word a unit; the last sentence is cut where the words end."""

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
