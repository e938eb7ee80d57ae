from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_files import source_kinds

from kvpolicy.benchmarks.choices.layouts import LAYOUTS
from kvpolicy.benchmarks.disjoint import check_disjoint
from kvpolicy.benchmarks.registry import BENCHMARKS, task_info, tasks_of, write_samples
from kvpolicy.benchmarks.ruler import DEFAULT_TASKS, RULER_TASKS, RulerTexts, generate
from kvpolicy.benchmarks.ruler.vocabulary import Draw, single_words
from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.splits import split_of
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS
from kvpolicy.text.sample import Sample

Count = Callable[[Sample], int]
KINDS = ("word", "number", "value", "uuid", "code", "variable", "example_variable")


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(700, 1500), task=st.sampled_from(DEFAULT_TASKS))
def test_splits_of_any_seed_have_nothing_in_common(seed: int, length: int, task: str, count_tokens: Count) -> None:
    check_disjoint(
        {
            split: [
                generate(task, split=split, index=index, seed=seed, length_tokens=length, count_tokens=count_tokens)
                for index in range(4)
            ]
            for split in SPLITS
        }
    )


def test_splits_with_outside_texts_have_nothing_in_common(ruler_texts: RulerTexts, count_tokens: Count) -> None:
    check_disjoint(
        {
            split: [
                generate(
                    task,
                    split=split,
                    index=index,
                    seed=0,
                    length_tokens=3000,
                    count_tokens=count_tokens,
                    texts=ruler_texts,
                )
                for task in RULER_TASKS
                for index in range(3)
            ]
            for split in SPLITS
        }
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_belongs_to_one_split(kind: str) -> None:
    drawn = {split: set(Draw(seed=5, split=split).take(kind, "any", 300)) for split in SPLITS}
    assert all(len(strings) == 300 for strings in drawn.values())
    assert len(set.union(*drawn.values())) == 900
    assert all(split_of(text) == split for split, strings in drawn.items() for text in strings)


def test_every_single_word_is_of_one_split_and_plain() -> None:
    words = {split: single_words(split) for split in SPLITS}
    assert sum(map(len, words.values())) == len(set().union(*words.values())) > 7000
    assert len(words["train"]) > 1.8 * len(words["test"])
    assert all(word.isalpha() and word.islower() for listed in words.values() for word in listed)


def _pair(count_tokens: Count, task: str) -> tuple[Sample, Sample]:
    train, test = (
        generate(task, split=split, index=0, seed=0, length_tokens=1500, count_tokens=count_tokens)
        for split in ("train", "test")
    )
    return train, test


def _needle_line(sample: Sample) -> str:
    return next(line for line in sample.context.split("\n") if line.startswith("One of"))


def _key(sample: Sample) -> str:
    return _needle_line(sample).split(" for ")[1].split(" is: ")[0]


def _value(sample: Sample) -> str:
    return _needle_line(sample).split(" is: ")[1].rstrip(".")


@pytest.mark.parametrize(("part", "kind"), [(_key, "key"), (_value, "needle")])
def test_a_shared_needle_is_named(part: Callable[[Sample], str], kind: str, count_tokens: Count) -> None:
    train, test = _pair(count_tokens, "niah_single_1")
    leaky = replace(test, context=test.context.replace(part(test), part(train)))
    with pytest.raises(InputError, match=f"the train and test splits share the {kind} '{part(train)}'") as raised:
        check_disjoint({"train": [train], "test": [leaky]})
    assert train.sample_id in str(raised.value) and test.sample_id in str(raised.value)


@pytest.mark.parametrize("task", ["cwe", "fwe", "vt"])
def test_a_shared_word_is_named(task: str, count_tokens: Count) -> None:
    train, test = _pair(count_tokens, task)
    stolen = train.references[0]
    leaky = replace(test, context=test.context.replace(test.references[0], stolen))
    with pytest.raises(InputError, match=f"share the (word|key) '{stolen}'"):
        check_disjoint({"train": [train], "test": [leaky]})


def test_shared_texts_are_named(ruler_texts: RulerTexts, count_tokens: Count) -> None:
    for task in ("niah_single_2", "qa_1", "qa_2"):
        train, test = (
            generate(
                task,
                split=split,
                index=0,
                seed=0,
                length_tokens=3000,
                count_tokens=count_tokens,
                texts=ruler_texts,
            )
            for split in ("train", "test")
        )
        start = len(train.context) // 3
        stolen = train.context[start : 2 * start].replace("One of the special magic", "")
        leaky = replace(test, context=f"{test.context}{stolen}" if "niah" in task else train.context)
        with pytest.raises(InputError, match="the train and test splits share the text"):
            check_disjoint({"train": [train], "test": [leaky]})


def test_a_sample_under_the_wrong_split_is_named(count_tokens: Count) -> None:
    train, _ = _pair(count_tokens, "fwe")
    with pytest.raises(InputError, match=r"ruler/fwe/train/0/0/1500 is of the train split but is filed under test"):
        check_disjoint({"test": [train]})
    with pytest.raises(InputError, match="share the seed"):
        check_disjoint({"train": [train], "test": [replace(train, split="test")]})


def test_samples_that_cannot_be_checked_are_refused(count_tokens: Count) -> None:
    train, _ = _pair(count_tokens, "fwe")
    with pytest.raises(InputError, match="benchmark 'other' is unknown"):
        check_disjoint({"train": [replace(train, benchmark="other")]})
    with pytest.raises(InputError, match="is not of the form"):
        check_disjoint({"train": [replace(train, sample_id="ruler/fwe/1")]})


FILE_TASKS = [info.task for name in BENCHMARKS.names if name != "ruler" for info in tasks_of(name)]
FILE_KINDS = [(task, kind) for task in FILE_TASKS for _, kind in source_kinds(str(task_info(task).source))]


def _of_files(ask: Callable[..., SampleRequest], task: str, kind: str, split: str, count: int = 12) -> list[Sample]:
    return list(islice(write_samples(ask(task, kind, split=split, length_tokens=5000)), count))


@pytest.mark.parametrize(("task", "kind"), FILE_KINDS)
def test_splits_of_public_files_have_nothing_in_common(task: str, kind: str, ask: Callable[..., SampleRequest]) -> None:
    samples = {split: _of_files(ask, task, kind, split) for split in SPLITS}
    assert all(len(own) >= 2 for own in samples.values())
    check_disjoint(samples)


@pytest.mark.parametrize("task", FILE_TASKS)
def test_a_shared_exemplar_paragraph_or_turn_is_named(task: str, ask: Callable[..., SampleRequest]) -> None:
    train, test = (_of_files(ask, task, "written", split, 1)[0] for split in ("train", "test"))
    if task == "dialogue":
        leaky = replace(test, answer_turns=(*test.answer_turns, max(train.context_turns, key=len)))
    elif task == "gov_report":
        leaky = replace(test, context=train.context)
    elif task.startswith("passage"):
        stolen = train.context.split("\n\n")[2]
        leaky = replace(test, context=f"{test.context}{stolen}\n\n")
    else:
        first = train.context.removeprefix(LAYOUTS[task].heading).split("\n\n")[0]
        leaky = replace(
            test, context=f"{LAYOUTS[task].heading}{first}\n\n{test.context.removeprefix(LAYOUTS[task].heading)}"
        )
    with pytest.raises(InputError, match="the train and test splits share the text") as raised:
        check_disjoint({"train": [train], "test": [leaky]})
    assert train.sample_id in str(raised.value) and test.sample_id in str(raised.value)


@pytest.mark.parametrize("task", [task for task in FILE_TASKS if task in LAYOUTS])
def test_an_exemplar_that_another_split_asks_is_named(task: str, ask: Callable[..., SampleRequest]) -> None:
    layout = LAYOUTS[task]
    train, test = (_of_files(ask, task, "written", split, 1)[0] for split in ("train", "test"))
    passage = train.context.rpartition("\n\n")[2]
    asked = f"{passage}{train.question}{layout.answers} anything\n\n"
    leaky = replace(test, context=f"{layout.heading}{asked}{test.context.removeprefix(layout.heading)}")
    with pytest.raises(InputError, match="the train and test splits share the text"):
        check_disjoint({"train": [train], "test": [leaky]})
