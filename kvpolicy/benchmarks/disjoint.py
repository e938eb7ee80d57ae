"""The check that train, validation and test samples have nothing in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvpolicy.benchmarks import choices, longbench, oasst2, ruler
from kvpolicy.benchmarks.choices.fingerprint import fingerprint as _choices_fingerprint
from kvpolicy.benchmarks.oasst2.fingerprint import fingerprint as _oasst2_fingerprint
from kvpolicy.benchmarks.ruler.fingerprint import fingerprint as _ruler_fingerprint
from kvpolicy.errors import InputError
from kvpolicy.sample import Sample

_FINGERPRINTS: Mapping[str, Callable[[Sample], Mapping[str, frozenset[str]]]] = {
    ruler.BENCHMARK: _ruler_fingerprint,
    oasst2.BENCHMARK: _oasst2_fingerprint,
    longbench.BENCHMARK: longbench.fingerprint,
    **{info.benchmark: _choices_fingerprint for info in choices.TASKS},
}


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
            for part in _traceable(sample):
                first = owner.setdefault(part, sample)
                if first.split != split:
                    kind, text = part
                    shown = text if len(text) <= 60 else f"{text[:57]}..."
                    raise InputError(
                        f"the {first.split} and {split} splits share the {kind} {shown!r} "
                        f"({first.sample_id}, {sample.sample_id}): generate both from one version and one set of texts"
                    )


def _traceable(sample: Sample) -> Iterable[tuple[str, str]]:
    if sample.benchmark not in _FINGERPRINTS:
        raise InputError(
            f"sample {sample.sample_id}: cannot check benchmark {sample.benchmark!r}; known: {', '.join(_FINGERPRINTS)}"
        )
    for kind, members in _FINGERPRINTS[sample.benchmark](sample).items():
        for member in sorted(members):
            yield kind, member
    yield "prompt", f"{sample.context}{sample.question}"
