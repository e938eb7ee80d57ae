"""LongBench: prompts as its own templates write them, answers, and what does not fit."""

import pytest
from written_files import ROWS, write_lines

from kvpolicy.benchmarks.longbench import TASKS, long_samples
from kvpolicy.benchmarks.registry import task_info
from kvpolicy.benchmarks.scoring import score_answer
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS
from kvpolicy.text.encoded_sample import count_all_tokens

NAMES = [info.task for info in TASKS]
# THUDM/LongBench, config/dataset2prompt.json; the blank at the end of the first one comes before our answer.
PUBLISHED = {
    "passage_retrieval_en": "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
    "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the "
    'number of the paragraph that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", '
    "etc.\n\nThe answer is: ",
    "passage_retrieval_zh": "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
    '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
    "gov_report": "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n"
    "{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
}


def _ask(ask, tmp_path, task, rows, **changes):
    return ask(task, "written", data=(f"{task}={write_lines(tmp_path / 'rows.jsonl', rows)}",), **changes)


def test_tokens_to_generate_are_longbenchs() -> None:
    assert {task: task_info(task).max_new_tokens for task in NAMES} == {
        "passage_retrieval_en": 32,
        "passage_retrieval_zh": 32,
        "gov_report": 512,
    }


@pytest.mark.parametrize("task", NAMES)
def test_every_row_of_a_split_is_a_sample_in_the_published_words(task: str, ask) -> None:
    rows = ROWS[task]()
    prompts = {
        PUBLISHED[task].replace("{context}", row["context"]).replace("{input}", row["input"]).strip(): row
        for row in rows
    }
    seen = []
    for split in SPLITS:
        request = ask(task, "written", split=split, length_tokens=8000)
        for sample in long_samples(request):
            row = prompts[f"{sample.context}{sample.question}{sample.answer_prefix}"]
            assert sample.references == tuple(row["answers"])
            assert sample.answer.strip() == row["answers"][0]
            assert count_all_tokens(sample, request.tokenizer) <= 8000
            assert score_answer(sample, sample.answer) == 1.0
            seen.append(row["_id"])
        assert not request.reported
    assert sorted(seen) == sorted(row["_id"] for row in rows)


def test_govreport_rows_read_as_longbenchs(ask, tmp_path) -> None:
    rows = ROWS["gov_report"]()
    other = [{"report": row["context"], "summary": row["answers"][0]} for row in rows]
    ours = list(long_samples(_ask(ask, tmp_path, "gov_report", other, length_tokens=8000)))
    assert ours == list(long_samples(ask("gov_report", "written", length_tokens=8000)))


def test_a_sample_longer_than_the_length_is_counted_by_what_it_needs(ask) -> None:
    request = ask("gov_report", "written", length_tokens=600)
    assert list(long_samples(request)) == []
    assert set(request.reported) <= {f"gov_report: sample that needs {size}K tokens" for size in (1, 2, 3)}
    assert sum(request.reported.values()) > 10


def test_an_answer_longer_than_what_is_generated_counts_towards_the_length(ask, tmp_path) -> None:
    rows = ROWS["gov_report"]()
    for row in rows:
        row["answers"] = ["word " * 400]
    assert list(long_samples(_ask(ask, tmp_path, "gov_report", rows, length_tokens=2500))) == []
    (sample, *_) = long_samples(_ask(ask, tmp_path, "gov_report", rows, length_tokens=4000))
    assert sample.answer == f" {'word ' * 399}word"


def test_empty_references_and_repetitions_are_counted(ask, tmp_path) -> None:
    rows = ROWS["passage_retrieval_en"]()
    broken = [{**rows[0], "answers": []}, {**rows[1], "answers": [" "]}, {**rows[2], "context": "\n"}, rows[3]]
    request = _ask(ask, tmp_path, "passage_retrieval_en", [*broken, *rows[3:]])
    list(long_samples(request))
    assert request.reported["passage_retrieval_en: row with an empty text or reference"] == 3
    assert request.reported["passage_retrieval_en: row that came before"] == 1


def test_rows_that_share_a_paragraph_over_splits_are_left_out(ask, tmp_path) -> None:
    rows = ROWS["passage_retrieval_zh"]()
    for row in rows[:10]:
        row["context"] += "\n\n段落7：" + "同一段文字。" * 5
    request = _ask(ask, tmp_path, "passage_retrieval_zh", rows)
    list(long_samples(request))
    assert request.reported["passage_retrieval_zh: row with a text that another split has"] == 10


def test_rows_of_another_task_are_refused(ask, tmp_path) -> None:
    rows = ROWS["passage_retrieval_en"]()
    with pytest.raises(InputError, match=r"rows\.jsonl line 1: it is of passage_retrieval_en, expected gov_report"):
        list(long_samples(_ask(ask, tmp_path, "gov_report", rows)))
    with pytest.raises(InputError, match=r"line 2: answers is \['Paragraph one'\], expected the number of a paragraph"):
        broken = [rows[0], {**rows[1], "answers": ["Paragraph one"]}]
        list(long_samples(_ask(ask, tmp_path, "passage_retrieval_en", broken)))
    with pytest.raises(InputError, match=r"line 1: answers is 'x', expected a list of texts"):
        list(long_samples(_ask(ask, tmp_path, "gov_report", [{"context": "a", "input": "", "answers": "x"}])))
