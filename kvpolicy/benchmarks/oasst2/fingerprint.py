"""What a dialogue must not share with another split: its longer texts."""

from collections.abc import Mapping

from kvpolicy.benchmarks.oasst2.trees import long_texts
from kvpolicy.text.sample import Sample


def fingerprint(sample: Sample) -> Mapping[str, frozenset[str]]:
    """The traceable parts of a sample, by what they are."""
    return {"text": long_texts((*sample.context_turns, *sample.answer_turns))}
