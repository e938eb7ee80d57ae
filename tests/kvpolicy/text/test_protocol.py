"""The two settings: how they divide a sequence."""

import dataclasses

import pytest

from kvpolicy.names import SETTINGS
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import Cut, check_setting, cut_sample
from kvpolicy.text.sample import Sample

SAMPLE = Sample(
    sample_id="ruler/vt/test/0/0/64",
    benchmark="ruler",
    task="vt",
    split="test",
    context="c",
    question="q",
    answer_prefix="",
    answer="a",
    references=("a",),
    max_new_tokens=4,
)


def _example(num_context=10, num_question=4, num_answer=3):
    return EncodedSample(
        sample=SAMPLE,
        context_ids=tuple(range(num_context)),
        question_ids=tuple(range(num_question)),
        answer_ids=tuple(range(num_answer)),
    )


def test_without_knowing_the_question_it_is_the_future():
    cut = cut_sample(_example(), "query_agnostic")
    assert cut == Cut(setting="query_agnostic", num_context=10, num_question=4, num_answer=3)
    assert cut.num_future == 7


def test_knowing_the_question_it_is_context():
    cut = cut_sample(_example(), "query_aware")
    assert cut == Cut(setting="query_aware", num_context=14, num_question=0, num_answer=3)
    assert cut.num_future == 3


def test_both_settings_divide_a_dialogue_alike():
    aware, agnostic = (cut_sample(_example(num_question=0), setting) for setting in ("query_aware", "query_agnostic"))
    assert (aware.num_context, aware.num_question, aware.num_answer) == (10, 0, 3)
    assert aware == dataclasses.replace(agnostic, setting="query_aware")


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_token_belongs_to_one_part(setting):
    cut = cut_sample(_example(), setting)
    assert cut.num_context + cut.num_future == 10 + 4 + 3


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("num_answer", [0, 1])
def test_an_answer_that_predicts_nothing_is_refused(fails_in_one_line, setting, num_answer):
    message = fails_in_one_line(cut_sample, _example(num_answer=num_answer), setting)
    assert SAMPLE.sample_id in message
    assert "at least 2" in message


def test_an_unknown_setting_is_refused_with_those_there_are(fails_in_one_line):
    for message in (
        fails_in_one_line(check_setting, "query_blind"),
        fails_in_one_line(cut_sample, _example(), "query_blind"),
    ):
        assert all(name in message for name in ("query_blind", *SETTINGS))
