"""What a multiple-choice sample must not share with another split, read back from its prompt."""

from collections.abc import Mapping

from kvpolicy.benchmarks.choices.layouts import LAYOUTS
from kvpolicy.text.sample import Sample


def fingerprint(sample: Sample) -> Mapping[str, frozenset[str]]:
    """The traceable parts of a sample: passages, questions and exemplars."""
    layout = LAYOUTS[sample.task]
    *exemplars, passage = sample.context.removeprefix(layout.heading).split("\n\n")
    written = [*exemplars, f"{passage}{sample.question}"]
    return {"text": frozenset[str]().union(*map(layout.traced, written))}
