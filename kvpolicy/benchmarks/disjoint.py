"""The check that train, validation and test samples have nothing in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpolicy.benchmarks.registry import BENCHMARKS
from kvpolicy.errors import InputError
from kvpolicy.text.sample import Sample


def check_disjoint(samples_by_split: Mapping[str, Iterable[Sample]]) -> None:
    """Proves that no needle, key, word, text, question, exemplar or seed occurs in two splits.

    What every prompt of a task shares by definition (instructions, RULER's noise lines) does not count.

    Args:
        samples_by_split: Samples of each split.

    Raises:
        InputError: Something is shared, or a sample is filed under a split that is not its own. The message names
            what, and two samples that have it.
    """
    owner: dict[tuple[str, str], Sample] = {}
    for split, samples in samples_by_split.items():
        for sample in samples:
            if sample.split != split:
                raise InputError(
                    f"sample {sample.sample_id} is of the {sample.split} split but is filed under {split}: "
                    "generate it for the split that uses it"
                )
            parts = BENCHMARKS[sample.benchmark].fingerprint(sample)
            traced = [(kind, text) for kind, texts in parts.items() for text in sorted(texts)]
            for part in [*traced, ("prompt", f"{sample.context}{sample.question}")]:
                first = owner.setdefault(part, sample)
                if first.split != split:
                    kind, text = part
                    shown = text if len(text) <= 60 else f"{text[:57]}..."
                    raise InputError(
                        f"the {first.split} and {split} splits share the {kind} {shown!r} "
                        f"({first.sample_id}, {sample.sample_id}): generate both from one version and one set of texts"
                    )
