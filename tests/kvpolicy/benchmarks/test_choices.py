"""Multiple choice: what is read of the public files, how contexts are filled, and who is an exemplar for whom."""

import json
from itertools import islice

import pandas as pd
import pytest
from written_files import ROWS, source_kinds, write_lines

from kvpolicy.benchmarks.choices import TASKS, questions
from kvpolicy.benchmarks.choices.items import Item, read_items
from kvpolicy.benchmarks.choices.layouts import LAYOUTS
from kvpolicy.benchmarks.splits import split_of
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS
from kvpolicy.text.encoded_sample import count_all_tokens, encode

NAMES = [info.task for info in TASKS]
KINDS = source_kinds(*NAMES)

FLAT = {
    "boolq": {"question": "is it  so", "passage": "It --\n so.", "answer": True},
    "arc_challenge": {"question": "Which?", "choices": ["a", "b", "c"], "answer": 2},
    "mmlu": {"subject": "law", "question": "Which?", "choices": ["a", "b", "c", "d"], "answer": 1},
    "hellaswag": {"ctx": "He runs", "endings": ["on.", "off."], "label": 1},
}
READ = {
    "boolq": Item(question="is it so", choices=("no", "yes"), answer=1, passage="It -- so.", owner="It -- so."),
    "arc_challenge": Item(question="Which?", choices=("a", "b", "c"), answer=2, owner="Which?\na\nb\nc"),
    "mmlu": Item(question="Which?", choices=("a", "b", "c", "d"), answer=1, topic="law", owner="Which?\na\nb\nc\nd"),
    "hellaswag": Item(question="He runs", choices=("on.", "off."), answer=1, owner="He runs\non.\noff."),
}
OTHER_FORMS = [
    ("boolq", {"question": "is it so", "passage": "It -- so.", "label": 1, "idx": 3}),
    (
        "arc_challenge",
        {"question": "Which?", "choices": {"text": ["a", "b", "c"], "label": ["A", "B", "C"]}, "answerKey": "C"},
    ),
    (
        "arc_challenge",
        {"question": "Which?", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, "answerKey": "3"},
    ),
    (
        "arc_challenge",
        {
            "question": {"stem": "Which?", "choices": [{"text": text, "label": text.upper()} for text in "abc"]},
            "answerKey": "C",
        },
    ),
    ("mmlu", {"subject": "law", "question": "Which?", "choices": ["a", "b", "c", "d"], "answer": "B"}),
    ("hellaswag", {"ctx": "He [title] runs", "endings": ["on.", "off."], "label": "1"}),
]


def _ask(ask, tmp_path, task, rows, **changes):
    return ask(task, "written", data=(f"{task}={write_lines(tmp_path / 'rows.jsonl', rows)}",), **changes)


@pytest.mark.parametrize("task", NAMES)
def test_flattened_rows_are_read(task: str, ask, tmp_path) -> None:
    assert read_items(_ask(ask, tmp_path, task, [FLAT[task]])) == [READ[task]]


@pytest.mark.parametrize(("task", "row"), OTHER_FORMS)
def test_the_forms_of_hub_and_authors_read_the_same(task: str, row, ask, tmp_path) -> None:
    (item,) = read_items(_ask(ask, tmp_path, task, [row]))
    expected = READ[task]
    if task == "hellaswag":
        assert item.question == "He. runs" and item.answer == expected.answer
    else:
        assert item == expected


@pytest.mark.parametrize("task", NAMES)
def test_parquet_reads_as_json_lines_do(task: str, ask, tmp_path) -> None:
    path = tmp_path / "rows.parquet"
    pd.DataFrame(ROWS[task]()).to_parquet(path)
    assert read_items(ask(task, "written", data=(f"{task}={path}",))) == read_items(ask(task, "written"))


def test_hellaswags_marks_and_activity_are_handled(ask, tmp_path) -> None:
    row = {
        "activity_label": "Making tea",
        "ctx": "[header] How to brew [title] Boil water. [step] Then you",
        "endings": ["[substeps] pour it.", "drink."],
        "label": "0",
        "source_id": "wikihow~1",
    }
    (item,) = read_items(_ask(ask, tmp_path, "hellaswag", [row]))
    assert (item.question, item.choices) == ("How to brew. Boil water. Then you", ("pour it.", "drink."))
    assert (item.topic, item.owner) == ("Making tea", "wikihow~1")
    assert LAYOUTS["hellaswag"].exemplar(item) == (
        "Text: Making tea: How to brew. Boil water. Then you\nContinuation: pour it.\n\n"
    )


def test_what_cannot_be_asked_is_counted(ask, tmp_path) -> None:
    cases = [
        ("boolq", {"question": "a", "passage": "b", "label": -1}, "item whose answer is withheld"),
        ("arc_challenge", {"question": "a", "choices": ["b", "c"], "answerKey": ""}, "item whose answer is withheld"),
        ("hellaswag", {"ctx": "a", "endings": ["b", "c"], "label": ""}, "item whose answer is withheld"),
        ("boolq", {"question": " ", "passage": "b", "answer": True}, "item with an empty question or an empty"),
        ("mmlu", {"subject": "s", "question": "a", "choices": ["b", "b", "c", "d"], "answer": 0}, "or repeated option"),
    ]
    for task, row, reason in cases:
        request = _ask(ask, tmp_path, task, [row, FLAT[task], FLAT[task]])
        assert read_items(request) == [READ[task]]
        assert sum(request.reported.values()) == 2
        assert any(reason in told for told in request.reported)
        assert request.reported[f"{task}: item that came before"] == 1


@pytest.mark.parametrize(
    ("task", "changes", "said"),
    [
        ("boolq", {"passage": None}, "passage is missing, expected text"),
        ("boolq", {"answer": "maybe"}, "answer is 'maybe', expected true or false"),
        ("arc_challenge", {"choices": "abc"}, "choices are not there, expected a list"),
        ("arc_challenge", {"question": {}}, "question is missing"),
        ("arc_challenge", {"choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answer": "E"}, "the answer is 'E'"),
        ("mmlu", {"answer": 4}, "the answer is 4, expected one of its 4 choices"),
        ("mmlu", {"subject": 3}, "subject is 3, expected text"),
        ("hellaswag", {"endings": [1, 2]}, "endings is .*, expected a list of texts"),
        ("hellaswag", {"label": "two"}, "the answer is 'two', expected one of its 2 choices"),
        ("hellaswag", {"label": "²"}, "the answer is '²', expected one of its 2 choices"),
    ],
)
def test_a_broken_row_is_named_by_its_line(task: str, changes, said: str, ask, tmp_path) -> None:
    with pytest.raises(InputError, match=rf"rows\.jsonl line 2: {said}.*hub's data set"):
        read_items(_ask(ask, tmp_path, task, [FLAT[task], {**FLAT[task], **changes}]))


EXPECTED = {
    "boolq": "Passage: It -- so.\nQuestion: is it so?\nAnswer: yes\n\n",
    "arc_challenge": "Question: Which?\nAnswer: c\n\n",
    "mmlu": "Question: Which?\nA. a\nB. b\nC. c\nD. d\nAnswer: B\n\n",
    "hellaswag": "Text: He runs\nContinuation: off.\n\n",
}


@pytest.mark.parametrize("task", NAMES)
def test_exemplars_are_written_as_expected(task: str) -> None:
    assert LAYOUTS[task].exemplar(READ[task]) == EXPECTED[task]


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_contexts_are_filled_with_exemplars_of_their_split(task: str, kind: str, ask) -> None:
    layout = LAYOUTS[task]
    items = {layout.exemplar(item): item for item in read_items(ask(task, kind))}
    for split in SPLITS:
        request = ask(task, kind, split=split, length_tokens=4000)
        samples = list(islice(questions(request), 5))
        assert len(samples) == 5
        asked = {sample.question for sample in samples}
        for sample in samples:
            assert count_all_tokens(sample, request.tokenizer) <= 4000
            *blocks, rest = sample.context.removeprefix(layout.heading).split("\n\n")
            used = [items[f"{block}\n\n"] for block in blocks]
            assert used and len(set(blocks)) == len(blocks)
            assert {split_of(item.owner) for item in used} == {split}
            assert not {layout.question(item) for item in used} & asked
            (own,) = (
                item
                for item in items.values()
                if layout.question(item) == sample.question and layout.passage(item) == rest
            )
            assert split_of(own.owner) == split
            assert sample.options == layout.options(own)
            assert sample.answer == sample.options[own.answer] == f" {sample.references[0]}"
            topics = [item.topic == own.topic for item in used]
            assert topics == sorted(topics)  # the own topic nearest to the question


@pytest.mark.parametrize("task", NAMES)
def test_one_exemplar_more_would_not_fit(task: str, ask) -> None:
    request = ask(task, "written", length_tokens=3000)
    longest = max(len(LAYOUTS[task].exemplar(item)) for item in read_items(request))
    for sample in islice(questions(request), 8):
        used = count_all_tokens(sample, request.tokenizer)
        assert 3000 - longest <= used <= 3000


@pytest.mark.parametrize("task", NAMES)
def test_options_are_tokens_that_follow_the_question(task: str, ask) -> None:
    request = ask(task, "written")
    sample = next(questions(request))
    encoded = encode(sample, request.tokenizer)
    decode = request.tokenizer.decode
    assert [decode(ids) for ids in encoded.option_ids] == list(sample.options)
    right = encoded.option_ids[sample.options.index(sample.answer)]
    assert encoded.answer_ids[: len(right)] == right
    assert decode(encoded.question_ids).endswith(f"<|turn|>assistant\n{LAYOUTS[task].answers}")


@pytest.mark.parametrize("task", NAMES)
def test_a_sample_is_a_function_of_its_request_and_place(task: str, ask) -> None:
    def digests(count=3, **changes):
        return [one.digest() for one in islice(questions(ask(task, "written", **changes)), count)]

    first = digests()
    assert digests() == first and digests(count=1) == first[:1]
    for other in ({"seed": 1}, {"split": "test"}, {"length_tokens": 3000}):
        assert not set(digests(**other)) & set(first)


def test_questions_are_all_asked_once_and_short_contexts_are_told(ask, tmp_path) -> None:
    rows = [{**FLAT["arc_challenge"], "question": f"Which is number {number}?"} for number in range(60)]
    request = _ask(ask, tmp_path, "arc_challenge", rows, length_tokens=6000)
    samples = list(questions(request))
    assert len({sample.question for sample in samples}) == len(samples) > 5
    (reason,) = request.reported
    assert "shorter than asked for: its split has" in reason
    assert request.reported[reason] == len(samples)


def test_a_question_that_does_not_fit_is_left_out_and_counted(ask, tmp_path) -> None:
    rows = ROWS["boolq"]()
    for row in rows[::2]:
        row["passage"] += " And so on." * 200
    request = _ask(ask, tmp_path, "boolq", rows, length_tokens=2000)
    samples = list(questions(request))
    assert samples and all(count_all_tokens(sample, request.tokenizer) <= 2000 for sample in samples)
    assert request.reported["boolq: question that does not fit 2000 tokens with an exemplar"] > 5


def test_what_two_splits_would_share_is_left_out(ask, tmp_path) -> None:
    rows = ROWS["boolq"]()
    for row in rows[:30]:
        row["question"] = "is this the same question over and over"
    request = _ask(ask, tmp_path, "boolq", rows)
    list(questions(request))
    assert request.reported["boolq: item with a text that another split has"] == 30
    assert json.dumps(dict(request.reported))  # as it goes into the artifact's metadata
