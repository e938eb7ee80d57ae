"""How multiple-choice items are written out: solved ones as exemplars, the asked one open.

Wording follows lm-evaluation-harness (tasks boolq, arc_challenge, hellaswag) and, for MMLU, its own evaluation
(lettered choices, arXiv 2009.03300). Departures: passages and HellaSwag's beginnings are labelled, MMLU's heading names
no subject, because exemplars of several follow each other, and the model's chat format goes around the prompt where it
has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_uppercase

from kvpolicy.benchmarks.choices.items import Item


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The wording of a task.

    Attributes:
        heading: Begins the context; may be empty.
        asks: Label of the question.
        answers: Label of the answer, which begins the assistant's turn.
        mark: Ends the question where it does not end so already.
        is_lettered: Whether choices are listed under letters, which are the options then.
        traces_whole: Whether an item is told by question and choices together; by any line of it otherwise.
    """

    heading: str
    asks: str = "Question:"
    answers: str = "Answer:"
    mark: str = ""
    is_lettered: bool = False
    traces_whole: bool = False

    def passage(self, item: Item) -> str:
        """The line of the passage, if there is one."""
        return f"Passage: {item.passage}\n" if item.passage else ""

    def question(self, item: Item) -> str:
        """The lines of the question, its listed choices included."""
        topic = f"{item.topic}: " if item.topic and not self.is_lettered else ""
        lines = [f"{self.asks} {topic}{item.question.removesuffix(self.mark)}{self.mark}"]
        if self.is_lettered:
            lines += [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, item.choices, strict=False)]
        return "".join(f"{line}\n" for line in lines)

    def options(self, item: Item) -> tuple[str, ...]:
        """The continuations of the answer's label that the model chooses from."""
        if self.is_lettered:
            return tuple(f" {letter}" for letter in ascii_uppercase[: len(item.choices)])
        return tuple(f" {text}" for text in item.choices)

    def exemplar(self, item: Item) -> str:
        """A solved item and a blank line."""
        solution = self.options(item)[item.answer]
        return f"{self.passage(item)}{self.question(item)}{self.answers}{solution}\n\n"

    def traced(self, text: str) -> frozenset[str]:
        """What tells an item from others, out of its lines as they are written, the answer's left out."""
        lines = [line for line in text.strip().split("\n") if not line.startswith(self.answers)]
        return frozenset(["\n".join(lines)] if self.traces_whole else lines)


LAYOUTS: Mapping[str, Layout] = {
    "boolq": Layout(heading="", mark="?"),
    "arc_challenge": Layout(heading=""),
    "mmlu": Layout(
        heading="The following are multiple choice questions (with answers).\n\n", is_lettered=True, traces_whole=True
    ),
    "hellaswag": Layout(heading="", asks="Text:", answers="Continuation:"),
}
"""The wording of every task."""
