import re
from collections import Counter
from collections.abc import Callable

import pytest

from kvpolicy.benchmarks.ruler import DEFAULT_TASKS, RULER_TASKS, RulerTexts, generate
from kvpolicy.benchmarks.ruler.needles import NOISE
from kvpolicy.errors import InputError
from kvpolicy.text.sample import Sample

Count = Callable[[Sample], int]
NEEDLE = re.compile(r"One of the special magic (?:number|uuid)s for ([\w-]+) is: ([\w-]+)\.")
TABLE = {
    "niah_single_1": ("noise", "word", "number", 1, 1, 1, 128),
    "niah_single_2": ("essay", "word", "number", 1, 1, 1, 128),
    "niah_single_3": ("essay", "word", "uuid", 1, 1, 1, 128),
    "niah_multikey_1": ("essay", "word", "number", 4, 1, 1, 128),
    "niah_multikey_2": ("needles", "word", "number", 1, 1, 1, 128),
    "niah_multikey_3": ("needles", "uuid", "uuid", 1, 1, 1, 128),
    "niah_multivalue": ("essay", "word", "number", 1, 4, 1, 128),
    "niah_multiquery": ("essay", "word", "number", 4, 1, 4, 128),
    "vt": ("", "", "", 0, 0, 0, 30),
    "cwe": ("", "", "", 0, 0, 0, 120),
    "fwe": ("", "", "", 0, 0, 0, 50),
    "qa_1": ("", "", "", 0, 0, 0, 32),
    "qa_2": ("", "", "", 0, 0, 0, 32),
}


def test_the_table_is_rulers() -> None:
    found = {
        name: (
            task.haystack,
            task.key_kind,
            task.value_kind,
            task.num_keys,
            task.num_values,
            task.num_queries,
            task.max_new_tokens,
        )
        for name, task in RULER_TASKS.items()
    }
    assert found == TABLE
    assert DEFAULT_TASKS == ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
    assert [name for name, task in RULER_TASKS.items() if task.match == "any"] == ["qa_1", "qa_2"]


@pytest.mark.parametrize("task", [name for name, row in RULER_TASKS.items() if row.kind == "niah"])
def test_needles_answer_the_question(task: str, ruler_texts: RulerTexts, count_tokens: Count) -> None:
    row = RULER_TASKS[task]
    sample = generate(
        task, split="validation", index=0, seed=0, length_tokens=1500, count_tokens=count_tokens, texts=ruler_texts
    )
    needles = NEEDLE.findall(sample.context)
    asked = [key for key in dict.fromkeys(key for key, _ in needles) if key in sample.question]
    assert len(asked) == row.num_queries
    assert sorted(value for key, value in needles if key in asked) == sorted(sample.references)
    assert len({value for _, value in needles}) == len(needles)
    assert all(key != value for key, value in needles)
    assert all(key in sample.answer_prefix for key in asked)
    if row.haystack == "needles":
        assert len(needles) == len(sample.context.split("\n")) - 2 > 10
    else:
        assert len(needles) == row.num_keys * row.num_values
    if row.value_kind == "number":
        assert all(re.fullmatch(r"[1-9]\d{6}", value) for _, value in needles)
    if row.key_kind == "word":
        assert all(re.fullmatch(r"[a-z]+-[a-z]+", key) for key, _ in needles)
    if row.haystack == "noise":
        lines = sample.context.rstrip("\n").split("\n")[1:]
        assert Counter(line == NOISE for line in lines)[False] == 1


def test_grammar_follows_the_number_of_answers(ruler_texts: RulerTexts, count_tokens: Count) -> None:
    def make(task: str) -> Sample:
        return generate(
            task, split="train", index=0, seed=0, length_tokens=1500, count_tokens=count_tokens, texts=ruler_texts
        )

    one, many = make("niah_single_3"), make("niah_multiquery")
    assert one.context.startswith("A special magic uuid is hidden within")
    assert one.question.startswith("What is the special magic uuid for ")
    assert one.answer_prefix.endswith(" mentioned in the provided text is")
    assert many.context.startswith("Some special magic numbers are hidden within")
    assert re.match(r"What are all the special magic numbers for \S+, \S+, \S+, and \S+ mentioned", many.question)
    assert many.answer_prefix.endswith(" mentioned in the provided text are")


def test_needles_lie_at_every_depth(count_tokens: Count) -> None:
    depths = []
    for index in range(60):
        sample = generate(
            "niah_single_1", split="train", index=index, seed=0, length_tokens=1500, count_tokens=count_tokens
        )
        depths.append(sample.context.index("One of the") / len(sample.context))
    quarters = Counter(min(3, int(4 * depth)) for depth in depths)
    assert all(quarters[quarter] >= 5 for quarter in range(4))


@pytest.mark.parametrize("length", [700, 4500])
def test_following_the_assignments_gives_the_references(length: int, count_tokens: Count) -> None:
    for index in range(5):
        sample = generate("vt", split="train", index=index, seed=0, length_tokens=length, count_tokens=count_tokens)
        example, task = sample.context.split("\n\n\n\n")
        for text, question, expected in (
            (task, sample.question, sample.references),
            (example, example[example.index("Question:") :], example.rsplit("they are:")[1].split()),
        ):
            memory: dict[str, str] = {}
            for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
                memory[name] = memory.get(source, source)
            asked = re.search(r"the value (\d{5}) in the text", question)
            assert asked is not None
            assert [name for name, value in memory.items() if value == asked[1]] == list(expected)
            assert len(expected) == 5
        assert task.count(NOISE) >= 1
        assert example.count(NOISE) == min(10, length // 200)


@pytest.mark.parametrize(
    ("length", "counts", "example_counts"), [(1500, (6, 1), (3, 1)), (4096, (30, 3), (10, 3)), (700, (6, 1), None)]
)
def test_the_common_words_are_the_most_common(
    length: int, counts: tuple[int, int], example_counts: tuple[int, int] | None, count_tokens: Count
) -> None:
    sample = generate("cwe", split="train", index=0, seed=0, length_tokens=length, count_tokens=count_tokens)
    instruction = "Below is a numbered list of words."
    *examples, task = sample.context.split(instruction)[1:]
    assert len(examples) == (example_counts is not None)
    lists = [(task, sample.references, counts)]
    if example_counts is not None:
        shown, _, answer = examples[0].partition("Question:")
        answer = answer.split("in the list are:")[1]
        lists.append((shown, tuple(re.findall(r"\d+\. (\S+)", answer)), example_counts))
    for text, expected, (often, seldom) in lists:
        numbered = re.findall(r"(\d+)\. (\S+)", text)
        assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
        tally = Counter(word for _, word in numbered)
        assert {word for word, count in tally.items() if count == often} == set(expected)
        assert {count for word, count in tally.items() if word not in expected} == {seldom}
        assert len(expected) == 10
    assert sample.answer.split() == [part for i, word in enumerate(sample.references, 1) for part in (f"{i}.", word)]


def test_common_words_go_on_when_the_single_words_are_used_up(count_tokens: Count) -> None:
    sample = generate("cwe", split="test", index=0, seed=0, length_tokens=60_000, count_tokens=count_tokens)
    words = Counter(re.findall(r"\d+\. (\S+)", sample.context.rsplit("Below is", 1)[1]))
    assert any("-" in word for word in words)
    assert sorted(word for word, count in words.items() if count == 30) == sorted(sample.references)
    assert 58_000 < count_tokens(sample) + sample.max_new_tokens <= 60_000


@pytest.mark.parametrize("length", [400, 1500, 8000])
def test_the_frequent_words_are_ranks_two_to_four_without_ties(length: int, count_tokens: Count) -> None:
    for index in range(4):
        sample = generate("fwe", split="test", index=index, seed=0, length_tokens=length, count_tokens=count_tokens)
        text = sample.context.split("coded words. ")[1].split()
        (noise, _), *ranked = Counter(text).most_common()
        assert noise == "..."
        assert tuple(word for word, _ in ranked[:3]) == sample.references
        frequencies = [count for _, count in ranked]
        assert frequencies[0] > frequencies[1] > frequencies[2] > frequencies[3]
        assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in ranked)
        # Zipf's law with alpha 2: rank 2 comes four ninths more often than rank 3, up to rounding down.
        assert abs(frequencies[0] * 4 / 9 - frequencies[1]) < 1.5


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_the_gold_paragraphs_are_there_at_changing_places(
    task: str, ruler_texts: RulerTexts, count_tokens: Count
) -> None:
    places, questions = set(), set()
    for index in range(8):
        sample = generate(
            task, split="train", index=index, seed=0, length_tokens=4000, count_tokens=count_tokens, texts=ruler_texts
        )
        pool = ruler_texts.questions(RULER_TASKS[task], "train")
        (asked,) = [question for question in pool.questions if sample.question.endswith(f"Question: {question.text}")]
        documents = re.split(r"(?:^|\n\n)Document \d+:\n", sample.context.rstrip("\n"))[1:]
        assert {text.rstrip() for text in asked.gold} <= {text.rstrip() for text in documents}
        assert {text.rstrip() for text in documents} <= {text.rstrip() for text in pool.documents}
        assert len(documents) == len(set(documents)) > len(asked.gold)
        assert sample.references == asked.answers
        places.add([text.rstrip() for text in documents].index(asked.gold[0].rstrip()))
        questions.add(asked.text)
    assert len(questions) == 8
    assert len(places) >= 3


def test_questions_run_out_with_a_clear_line(ruler_texts: RulerTexts, count_tokens: Count) -> None:
    with pytest.raises(InputError, match=r"the test split has \d+ questions, so sample 99999 does not exist"):
        generate(
            "qa_1",
            split="test",
            index=99_999,
            seed=0,
            length_tokens=4000,
            count_tokens=count_tokens,
            texts=ruler_texts,
        )
