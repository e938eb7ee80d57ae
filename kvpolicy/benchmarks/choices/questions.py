"""Multiple choice by log-likelihood: BoolQ, ARC-Challenge, MMLU and HellaSwag with contexts of solved exemplars.

The context has as many solved exemplars as fit the length (and BoolQ's passage), then the question follows, and every
option is scored as its continuation. What is asked is never an exemplar, and no split sees anything of another: an
item belongs to the split that owns its text (BoolQ: its passage; HellaSwag: its source), and within a split the same
hash makes one half of the items exemplars. Exemplars of the asked item's topic (MMLU: its subject) come last, and first
when there is room for few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from kvpolicy.benchmarks.choices.items import Item, read_items
from kvpolicy.benchmarks.choices.layouts import LAYOUTS, Layout
from kvpolicy.benchmarks.ruler.prompt_plan import largest_fitting
from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.splits import share_out, stable_seed
from kvpolicy.benchmarks.task import TaskInfo
from kvpolicy.text.encoded_sample import count_all_tokens
from kvpolicy.text.sample import Sample

VERSION = "1"
_DESCRIPTIONS = {
    "boolq": "Yes or no to a question about a passage, by log-likelihood.",
    "arc_challenge": "Science questions with three to five options, by log-likelihood.",
    "mmlu": "Questions on 57 subjects with lettered options, by log-likelihood.",
    "hellaswag": "Which of four endings follows, by log-likelihood.",
}
TASKS = tuple(
    TaskInfo(
        benchmark=task,
        version=VERSION,
        task=task,
        source=task,
        metrics=("accuracy",) if task in ("boolq", "mmlu") else ("accuracy", "accuracy_normalised"),
        max_new_tokens=0,
        description=description,
    )
    for task, description in _DESCRIPTIONS.items()
)
"""Each task is a benchmark of its own."""

SHORT_SHARE = 0.75


def questions(request: SampleRequest) -> Iterator[Sample]:
    """The questions of a split in an order that the seed draws, until they run out.

    Raises:
        InputError: A row of a file is broken.
    """
    layout = LAYOUTS[request.task]
    shared, num_shared = share_out(
        read_items(request),
        owner=lambda item: item.owner,
        parts=lambda item: layout.traced(f"{layout.passage(item)}{layout.question(item)}"),
    )
    request.report("item with a text that another split has", num_shared)
    exemplars: list[Item] = []
    asked: list[Item] = []
    for item in sorted(shared[request.split], key=lambda item: (item.owner, item.question)):
        (exemplars if stable_seed("exemplar", item.owner) % 2 else asked).append(item)
    request.rng("order").shuffle(asked)
    index = 0
    for item in asked:
        sample = _sample(request, layout, item, exemplars, index)
        if sample is None:
            request.report(f"question that does not fit {request.length_tokens} tokens with an exemplar")
            continue
        yield sample
        index += 1


def fingerprint(sample: Sample) -> Mapping[str, frozenset[str]]:
    """Read back from a prompt the texts that no other split may have: passages, questions, exemplars."""
    layout = LAYOUTS[sample.task]
    *exemplars, passage = sample.context.removeprefix(layout.heading).split("\n\n")
    return {"text": frozenset[str]().union(*map(layout.traced, [*exemplars, f"{passage}{sample.question}"]))}


def _sample(request: SampleRequest, layout: Layout, item: Item, exemplars: list[Item], index: int) -> Sample | None:
    """The question after as many exemplars as fit; None where not even one does."""
    drawn = list(exemplars)
    request.rng("exemplars", item.owner, item.question).shuffle(drawn)
    drawn.sort(key=lambda exemplar: exemplar.topic != item.topic)  # stable: the same topic first, each in drawn order
    options = layout.options(item)

    def write(size: int) -> Sample:
        solved = "".join(layout.exemplar(exemplar) for exemplar in reversed(drawn[:size]))
        return request.sample(
            index,
            context=f"{layout.heading}{solved}{layout.passage(item)}",
            question=layout.question(item),
            answer_prefix=layout.answers,
            answer=options[item.answer],
            references=(options[item.answer].strip(),),
            max_new_tokens=0,
            options=options,
        )

    if not drawn:
        return None
    tokens_of = partial(count_all_tokens, tokenizer=request.tokenizer)
    size = largest_fitting(
        lambda size: tokens_of(write(size)), budget=request.length_tokens, smallest=1, largest=len(drawn)
    )
    if size is None:
        return None
    sample = write(size)
    if size == len(drawn) and tokens_of(sample) < SHORT_SHARE * request.length_tokens:
        request.report(f"sample shorter than asked for: its split has {size} exemplars")
    return sample
