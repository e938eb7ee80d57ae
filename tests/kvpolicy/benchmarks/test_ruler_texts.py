import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from kvpolicy.benchmarks.ruler import RulerTexts, read_texts
from kvpolicy.benchmarks.ruler.tasks import RULER_TASKS
from kvpolicy.benchmarks.ruler.texts import split_sentences
from kvpolicy.benchmarks.sources import find_files
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS


def _read(**files: Path) -> RulerTexts:
    return read_texts(find_files([f"{source}={path}" for source, path in files.items()]))


def test_sentences_end_at_punctuation_but_not_at_abbreviations() -> None:
    prose = 'Mr. Hale met J. Smith.  "Is it\n\ntrue?" he asked. (It was!) No end'
    assert split_sentences(prose) == [
        "Mr. Hale met J. Smith.",
        '"Is it true?"',
        "he asked.",
        "(It was!)",
        "No end",
    ]
    assert split_sentences("") == []


def test_sentences_lose_no_word(ruler_texts: RulerTexts) -> None:
    for sentences in ruler_texts.essays.values():
        text = " ".join(sentences)
        assert " ".join(split_sentences(text)).split() == text.split()


def test_no_text_reaches_two_splits(ruler_texts: RulerTexts) -> None:
    for first, second in (("train", "validation"), ("train", "test"), ("validation", "test")):
        long = [{s for s in ruler_texts.essays[split] if len(s.split()) >= 5} for split in (first, second)]
        assert long[0] and long[1] and not long[0] & long[1]
        for pools in (ruler_texts.squad, ruler_texts.hotpotqa):
            documents, questions = [], []
            for split in (first, second):
                pool = pools[split]
                reachable = {text for question in pool.questions for text in (*question.gold, *question.near)}
                documents.append(reachable | set(pool.documents))
                questions.append({question.text for question in pool.questions})
            assert documents[0] and documents[1] and not documents[0] & documents[1]
            assert questions[0] and questions[1] and not questions[0] & questions[1]


def test_unanswerable_questions_are_left_out_and_answers_are_distinct(squad_file: Path) -> None:
    pools = _read(squad=squad_file).squad
    asked = [question for split in SPLITS for question in pools[split].questions]
    assert len(asked) == 24 * 4
    assert all(question.text.startswith("When was") for question in asked)
    assert all(len(question.answers) == 1 for question in asked)


def test_both_forms_of_hotpotqa_read_the_same(hotpotqa_file: Path, tmp_path: Path) -> None:
    entries = json.loads(hotpotqa_file.read_text())
    for entry in entries:
        entry["id"] = entry.pop("_id")
        for field, columns in (("context", ("title", "sentences")), ("supporting_facts", ("title", "sent_id"))):
            entry[field] = {name: [row[place] for row in entry[field]] for place, name in enumerate(columns)}
    exported = tmp_path / "export.json"
    exported.write_text(json.dumps(entries))
    assert _read(hotpotqa=exported).hotpotqa == _read(hotpotqa=hotpotqa_file).hotpotqa


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_squad_read_as_the_published_file(suffix: str, squad_file: Path, tmp_path: Path) -> None:
    rows = [
        {
            "id": asked["id"],
            "title": article["title"],
            "context": paragraph["context"],
            "question": asked["question"],
            "answers": {name: [answer[name] for answer in asked["answers"]] for name in ("text", "answer_start")},
        }
        for article in json.loads(squad_file.read_text())["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
    ]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    published, read = _read(squad=squad_file).squad, _read(squad=path).squad
    assert read == published


@pytest.mark.parametrize("content", ["not json", '[{"title": "T"}]', '{"data": [{"title": "T"}]}', "{}", '{"data": 3}'])
def test_a_file_of_another_format_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(content)
    with pytest.raises(InputError, match=r"broken\.json does not have the expected format .*SQuAD v2\.0 json"):
        _read(squad=file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"essays file .*none\.txt does not exist.* plain text"):
        _read(essays=tmp_path / "none.txt")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        _read(essays=latin)


def test_essays_that_are_too_short_for_a_split_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("One sentence only.")
    texts = _read(essays=file)
    with pytest.raises(InputError, match="no sentences for the train split: give more text"):
        texts.sentences(RULER_TASKS["niah_single_2"], "train")


def test_hotpotqa_is_read_alike_in_every_process(hotpotqa_file: Path) -> None:
    """Sets of texts have another order in every process, which may not become the order of paragraphs."""
    program = (
        "import sys; from kvpolicy.benchmarks.ruler.texts import read_texts;"
        " from kvpolicy.benchmarks.sources import find_files;"
        " print(read_texts(find_files([f'hotpotqa={sys.argv[1]}'])).hotpotqa)"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, str(hotpotqa_file)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert "QuestionPool" in printed[0]
    assert len(set(printed)) == 1
