from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.benchmarks.registry import benchmark_names, task_info, tasks_of
from kvpolicy.benchmarks.ruler import DEFAULT_TASKS, RULER_TASKS, VERSION
from kvpolicy.benchmarks.sample import Sample
from kvpolicy.benchmarks.scoring import score_answer, string_match
from kvpolicy.errors import InputError


def test_ruler_is_listed_with_what_each_task_needs() -> None:
    assert benchmark_names() == ("ruler",)
    rows = tasks_of("ruler")
    assert [row.task for row in rows] == list(RULER_TASKS)
    assert tuple(row.task for row in rows if row.is_default) == DEFAULT_TASKS
    assert {row.needs_text for row in rows} == {None, "essays", "squad", "hotpotqa"}
    assert all((row.text_source is None) == row.is_default for row in rows)
    assert all(row.version == VERSION and row.max_new_tokens > 0 and row.description for row in rows)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown benchmark 'rule': choose one of ruler"):
        tasks_of("rule")
    with pytest.raises(InputError, match="ruler has no task 'qa': choose one of niah_single_1, "):
        task_info("ruler", "qa")


def test_string_match_counts_substrings_in_any_case() -> None:
    assert string_match("They are Alpha, BETA", ("alpha", "Beta", "gamma", "delta")) == 0.5
    assert string_match("nothing", ("alpha",)) == 0.0
    assert string_match("It is Paris.", ("Paris, France", "paris"), match="any") == 1.0
    assert string_match("It is Rome.", ("Paris, France", "paris"), match="any") == 0.0
    with pytest.raises(InputError, match="at least one reference"):
        string_match("It is Rome.", ())


@given(st.lists(st.text(min_size=1), min_size=1), st.text())
def test_string_match_is_a_share_and_full_for_the_references_themselves(refs: list[str], text: str) -> None:
    score = string_match(text, refs)
    assert score == sum(ref.lower() in text.lower() for ref in refs) / len(refs)
    assert string_match("|".join(refs), refs) == 1.0
    assert (score > 0) == (string_match(text, refs, match="any") == 1.0)


def test_the_task_decides_the_rule() -> None:
    sample = Sample(
        sample_id="ruler/vt/test/0/0/1000",
        benchmark="ruler",
        task="vt",
        split="test",
        context="c",
        question="q",
        answer_prefix="",
        answer=" AAAAA BBBBB",
        references=("AAAAA", "BBBBB"),
        max_new_tokens=30,
    )
    assert score_answer(sample, "aaaaa") == 0.5
    assert score_answer(replace(sample, task="qa_1"), "aaaaa") == 1.0
