import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpolicy.benchmarks.ruler import DEFAULT_TASKS, RULER_TASKS, RulerTexts, generate
from kvpolicy.benchmarks.ruler.generator import sample_seed
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS
from kvpolicy.text.sample import Sample

Count = Callable[[Sample], int]
# Tokens of the longest unit of each haystack under the test's counter: what a full prompt may leave unused.
UNIT_TOKENS = {"niah": 60, "vt": 60, "cwe": 40, "fwe": 100, "qa": 1200}
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.mark.parametrize("length", [1400, 4500])
@pytest.mark.parametrize("task", RULER_TASKS)
def test_a_sample_fills_its_length_and_no_more(
    task: str, length: int, ruler_texts: RulerTexts, count_tokens: Count
) -> None:
    row = RULER_TASKS[task]
    for index in range(3):
        sample = generate(
            task,
            split="train",
            index=index,
            seed=3,
            length_tokens=length,
            count_tokens=count_tokens,
            texts=ruler_texts,
        )
        unused = length - row.max_new_tokens - count_tokens(sample)
        assert 0 <= unused <= UNIT_TOKENS[row.kind]
        assert sample.sample_id == f"ruler/{task}/train/3/{index}/{length}"
        assert sample.max_new_tokens == row.max_new_tokens
        assert (sample.benchmark, sample.task, sample.split) == ("ruler", task, "train")


@pytest.mark.parametrize("task", RULER_TASKS)
def test_the_answer_holds_what_the_metric_looks_for_and_the_context_too(
    task: str, ruler_texts: RulerTexts, count_tokens: Count
) -> None:
    sample = generate(
        task, split="test", index=1, seed=0, length_tokens=1400, count_tokens=count_tokens, texts=ruler_texts
    )
    wanted = sample.references[:1] if RULER_TASKS[task].match == "any" else sample.references
    assert all(reference in sample.answer for reference in wanted)
    assert sample.answer.startswith(" ") and not sample.answer_prefix.endswith(" ")
    if task != "qa_2":  # HotpotQA also has yes and no
        assert all(reference in sample.context for reference in wanted)
        assert not any(reference in sample.question for reference in wanted)


@pytest.mark.parametrize("task", RULER_TASKS)
def test_one_unit_more_would_not_fit_and_few_counts_find_that(
    task: str, ruler_texts: RulerTexts, count_tokens: Count
) -> None:
    seen: list[int] = []

    def counting(sample: Sample) -> int:
        seen.append(count_tokens(sample))
        return seen[-1]

    budget = 6000 - RULER_TASKS[task].max_new_tokens
    generate(task, split="train", index=0, seed=0, length_tokens=6000, count_tokens=counting, texts=ruler_texts)
    assert len(seen) <= 14
    all_used = task.startswith("qa") and max(seen) <= budget  # a small file may run out of paragraphs
    assert max(seen) > budget or all_used


@pytest.mark.parametrize("task", RULER_TASKS)
def test_a_sample_is_a_function_of_its_arguments(task: str, ruler_texts: RulerTexts, count_tokens: Count) -> None:
    def digest(*, split: str = "train", index: int = 0, seed: int = 0, length: int = 1400) -> str:
        return generate(
            task,
            split=split,
            index=index,
            seed=seed,
            length_tokens=length,
            count_tokens=count_tokens,
            texts=ruler_texts,
        ).digest()

    first = digest()
    assert digest() == first
    others = [digest(split="test"), digest(index=1), digest(seed=1), digest(length=1500)]
    assert len({first, *others}) == 5


GOLDEN = {
    "niah_single_1": "c633f41b3b8d8a11",
    "niah_multikey_2": "9ccd99f58d48f3fb",
    "niah_multikey_3": "099dd00550975e8f",
    "vt": "f0e0e00d8d72609f",
    "cwe": "de1b8b23c7ecccc9",
    "fwe": "01f751c768fbac4a",
}


@pytest.mark.parametrize("task", DEFAULT_TASKS)
def test_prompts_stay_the_same_for_one_version(task: str, count_tokens: Count) -> None:
    sample = generate(task, split="test", index=7, seed=11, length_tokens=1400, count_tokens=count_tokens)
    assert sample.digest()[:16] == GOLDEN[task], "prompts changed: raise VERSION, then renew these digests"


@pytest.mark.parametrize("task", RULER_TASKS)
def test_a_short_length_names_the_smallest_that_fits_and_it_does(
    task: str, ruler_texts: RulerTexts, count_tokens: Count
) -> None:
    with pytest.raises(InputError, match=rf"ruler/{task} sample 2 does not fit 90 tokens") as raised:
        generate(task, split="train", index=2, seed=0, length_tokens=90, count_tokens=count_tokens, texts=ruler_texts)
    found = re.search(r"the smallest length that fits is (\d+) tokens", str(raised.value))
    assert found is not None
    length = int(found[1])
    assert f"set prompts.length_tokens to {length} or more" in str(raised.value)
    sample = generate(
        task, split="train", index=2, seed=0, length_tokens=length, count_tokens=count_tokens, texts=ruler_texts
    )
    assert count_tokens(sample) + sample.max_new_tokens <= length


@settings(max_examples=40, deadline=None)
@given(
    task=st.sampled_from(DEFAULT_TASKS),
    split=st.sampled_from(SPLITS),
    index=st.integers(0, 10**6),
    seed=st.integers(0, 2**64),
    length=st.integers(700, 1600),
)
def test_any_default_sample_fits(
    *, task: str, split: str, index: int, seed: int, length: int, count_tokens: Count
) -> None:
    sample = generate(task, split=split, index=index, seed=seed, length_tokens=length, count_tokens=count_tokens)
    assert length - UNIT_TOKENS[RULER_TASKS[task].kind] <= count_tokens(sample) + sample.max_new_tokens <= length


def test_unknown_names_and_indices_are_refused(count_tokens: Count) -> None:
    def make(task: str = "vt", split: str = "test", index: int = 0) -> Sample:
        return generate(task, split=split, index=index, seed=0, length_tokens=1000, count_tokens=count_tokens)

    with pytest.raises(InputError, match=r"no task 'niah': choose one of niah_single_1, .*qa_2"):
        make(task="niah")
    with pytest.raises(InputError, match="unknown split 'dev': choose one of train, validation, test"):
        make(split="dev")
    with pytest.raises(InputError, match="at least 0, got -1"):
        make(index=-1)


@pytest.mark.parametrize(
    ("task", "file"),
    [("niah_single_2", "essays, .* plain text"), ("qa_1", "squad, .*dev-v2.0.json"), ("qa_2", "hotpotqa, .* HotpotQA")],
)
def test_a_missing_text_is_named_with_where_to_get_it(task: str, file: str, count_tokens: Count) -> None:
    with pytest.raises(InputError, match=f"task {task} needs {file}"):
        generate(task, split="test", index=0, seed=0, length_tokens=1000, count_tokens=count_tokens)


def test_sample_seeds_differ_in_every_argument() -> None:
    base: dict[str, Any] = {"task": "vt", "split": "test", "seed": 1, "index": 2, "length_tokens": 3}
    others: list[dict[str, Any]] = [
        {"task": "fwe"},
        {"split": "train"},
        {"seed": 2},
        {"index": 1},
        {"length_tokens": 4},
        {"seed": 12, "index": 3},
    ]
    seeds = {sample_seed(**{**base, **other}) for other in [{}, *others]}
    assert len(seeds) == 7


def test_multikey_3_reads_as_another_generator_writes_it(foreign_multikey_3_prompt: str, count_tokens: Count) -> None:
    sample = generate("niah_multikey_3", split="test", index=0, seed=0, length_tokens=4096, count_tokens=count_tokens)
    ours = f"{sample.context}{sample.question} {sample.answer_prefix}"

    def shape(prompt: str) -> list[str]:
        return list(dict.fromkeys(UUID.sub("UUID", prompt).split("\n")))

    assert shape(ours) == shape(foreign_multikey_3_prompt)
