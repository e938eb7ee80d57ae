"""Writes RULER samples that fill a length, for any task, split and tokenizer.

A sample is a pure function of (task, split, seed, index, length), the outside texts and the token counter. The prompt
and the tokens to generate together stay within the length (arXiv 2404.06654, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

from kvpolicy.benchmarks.ruler.needles import plan_needles
from kvpolicy.benchmarks.ruler.prompt_plan import Plan, largest_fitting
from kvpolicy.benchmarks.ruler.questions import plan_question
from kvpolicy.benchmarks.ruler.tasks import BENCHMARK, RulerTask, ruler_task
from kvpolicy.benchmarks.ruler.texts import RulerTexts, read_texts
from kvpolicy.benchmarks.ruler.variables import plan_variables
from kvpolicy.benchmarks.ruler.vocabulary import Draw
from kvpolicy.benchmarks.ruler.words import plan_common_words, plan_frequent_words
from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.sources import DataFiles
from kvpolicy.benchmarks.splits import check_split, stable_seed
from kvpolicy.errors import InputError
from kvpolicy.text.encoded_sample import count_prompt_tokens
from kvpolicy.text.sample import Sample

_NO_TEXTS = RulerTexts()


def generate(
    task: str,
    *,
    split: str,
    index: int,
    seed: int,
    length_tokens: int,
    count_tokens: Callable[[Sample], int],
    texts: RulerTexts = _NO_TEXTS,
) -> Sample:
    """Writes one sample.

    Args:
        task: Name of a task of `RULER_TASKS`.
        split: `train`, `validation` or `test`; no needle, key or text is shared between them.
        index: Number of the sample within (task, split, seed, length).
        seed: Seed of the set of samples.
        length_tokens: Prompt tokens and tokens to generate, together, at most.
        count_tokens: Prompt tokens of a sample as the model sees them, such as
            `kvpolicy.text.encoded_sample.count_prompt_tokens` with a tokenizer.
        texts: Outside texts, from `read_texts`; seven tasks need one.

    Returns:
        The sample, its haystack as long as fits: one unit more (a line, a word, a paragraph) would not.

    Raises:
        InputError: The task or split is unknown, its text was not given, or it does not fit the length (the message
            names the smallest length that does).
    """
    row = ruler_task(task)
    check_split(split)
    if index < 0:
        raise InputError(f"ruler/{task}: index must be at least 0, got {index}")

    plans = partial(_plans, row, split=split, index=index, seed=seed, texts=texts)

    def sample_of(plan: Plan, size: int, length: int) -> Sample:
        return Sample(
            sample_id=f"{BENCHMARK}/{task}/{split}/{seed}/{index}/{length}",
            benchmark=BENCHMARK,
            task=task,
            split=split,
            max_new_tokens=row.max_new_tokens,
            **plan.write(size),
        )

    def tokens_of(plan: Plan, length: int, size: int) -> int:
        return count_tokens(sample_of(plan, size, length))

    for plan in plans(length_tokens=length_tokens):
        size = largest_fitting(
            partial(tokens_of, plan, length_tokens),
            budget=length_tokens - row.max_new_tokens,
            smallest=plan.smallest,
            largest=plan.largest,
        )
        if size is not None:
            return sample_of(plan, size, length_tokens)

    def needed(length: int) -> int:
        tightest = plans(length_tokens=length)[-1]
        return tokens_of(tightest, length, tightest.smallest) + row.max_new_tokens

    fitting = _smallest_length(needed, above=length_tokens)
    raise InputError(
        f"{BENCHMARK}/{task} sample {index} does not fit {length_tokens} tokens: the smallest length that fits is "
        f"{fitting} tokens ({fitting - row.max_new_tokens} of prompt, {row.max_new_tokens} to generate): "
        f"set prompts.length_tokens to {fitting} or more, or leave the task out"
    )


def ruler_samples(request: SampleRequest) -> Iterator[Sample]:
    """The samples of a task, without an end (question answering ends in an error that says how many there are).

    Raises:
        InputError: As `generate`, or a file is not what it should be.
    """
    source = ruler_task(request.task).source
    texts = read_texts(DataFiles(files=request.files.of(source))) if source else _NO_TEXTS
    for index in count():
        yield generate(
            request.task,
            split=request.split,
            index=index,
            seed=request.seed,
            length_tokens=request.length_tokens,
            count_tokens=partial(count_prompt_tokens, tokenizer=request.tokenizer),
            texts=texts,
        )


def sample_seed(*, task: str, split: str, seed: int, index: int, length_tokens: int) -> int:
    """The seed of everything random in one sample; two samples never share one."""
    return stable_seed(BENCHMARK, task, split, seed, index, length_tokens)


def _plans(
    task: RulerTask, *, split: str, index: int, seed: int, length_tokens: int, texts: RulerTexts
) -> Sequence[Plan]:
    """The sample's plans, the preferred one first, the one that needs the fewest tokens last."""
    own_seed = sample_seed(task=task.task, split=split, seed=seed, index=index, length_tokens=length_tokens)
    draw = Draw(seed=own_seed, split=split)
    if task.kind == "niah":
        return [plan_needles(task, draw, texts.sentences(task, split) if task.haystack == "essay" else ())]
    if task.kind == "vt":
        return plan_variables(draw, length_tokens=length_tokens)
    if task.kind == "cwe":
        return plan_common_words(draw, length_tokens=length_tokens)
    if task.kind == "fwe":
        return [plan_frequent_words(draw, length_tokens=length_tokens)]
    order_seed = stable_seed(BENCHMARK, task.task, split, seed)
    return [plan_question(task, draw, texts.questions(task, split), index=index, order_seed=order_seed)]


def _smallest_length(needed: Callable[[int], int], *, above: int) -> int:
    """The next length that fits. Another length draws another sample, which may need a few tokens more."""
    length = needed(above)
    while needed(length) > length:
        length = max(length + 1, needed(length))
    return length
