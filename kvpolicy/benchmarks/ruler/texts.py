"""The outside texts that seven of RULER's tasks need, read from files that the user names and shared out to splits.

No text reaches two splits. Essays are cut into three stretches of neighbouring sentences (a half, a quarter, a
quarter), and a sentence that occurs in more than one is left out. SQuAD articles belong to a split by their titles.
HotpotQA questions belong to a split by their ids and carry their gold paragraphs along; every other paragraph belongs
to a split by its title. What two splits would share is left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvpolicy.benchmarks.file_rows import parse_json, read_rows, read_text
from kvpolicy.benchmarks.ruler.tasks import RulerTask
from kvpolicy.benchmarks.sources import SOURCES, DataFile, DataFiles, missing_source
from kvpolicy.benchmarks.splits import in_several, split_of
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[.!?][\"'”’)\]])\s+")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|i\.e|e\.g)|\b[A-Z])\.$")
MIN_SENTENCE_WORDS = 5
"""Shorter sentences ("Yes.") are common property: they do not count as a shared text."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with the paragraphs that answer it.

    Attributes:
        text: The question.
        answers: Accepted answers, without repetition; the first is the reference.
        gold: Paragraphs that are needed.
        near: Paragraphs that are the likeliest to distract, the first to fill with.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class QuestionPool:
    """Questions and paragraphs of one split."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RulerTexts:
    """Outside texts by split; make it with `read_texts`. Empty by default: six tasks need none.

    Attributes:
        essays: Sentences of each split.
        squad: Questions of each split.
        hotpotqa: Questions of each split.
    """

    essays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    squad: Mapping[str, QuestionPool] = field(default_factory=dict)
    hotpotqa: Mapping[str, QuestionPool] = field(default_factory=dict)

    def sentences(self, task: RulerTask, split: str) -> tuple[str, ...]:
        """Essay sentences of a split.

        Raises:
            InputError: No essays were given, or too few.
        """
        if not self.essays:
            raise missing_source(task.task, task.source or "")
        sentences = self.essays.get(split, ())
        if not sentences:
            raise InputError(f"ruler/{task.task}: the essays hold no sentences for the {split} split: give more text")
        return sentences

    def questions(self, task: RulerTask, split: str) -> QuestionPool:
        """Questions of a split for `qa_1` or `qa_2`.

        Raises:
            InputError: The file was not given, or holds no question for the split.
        """
        by_split = self.squad if task.source == "squad" else self.hotpotqa
        if not by_split:
            raise missing_source(task.task, task.source or "")
        pool = by_split.get(split)
        if pool is None or not pool.questions:
            raise InputError(f"ruler/{task.task}: the {task.source} file holds no question for the {split} split")
        return pool


def read_texts(files: DataFiles) -> RulerTexts:
    """Reads what the user names of essays (taken together), SQuAD and HotpotQA.

    SQuAD is the published json or rows as the hub has them, HotpotQA the published distractor json or the hub's rows.

    Raises:
        InputError: A file cannot be read or does not have its format.
    """
    prose = "\n\n".join(map(read_text, files.of("essays")))
    return RulerTexts(
        essays=_share_out_essays(split_sentences(prose)) if files.of("essays") else {},
        squad=_parsed(files.of("squad"), _squad_articles, _share_out_squad),
        hotpotqa=_parsed(files.of("hotpotqa"), _hotpotqa_entries, _share_out_hotpotqa),
    )


def split_sentences(prose: str) -> list[str]:
    """Sentences by their punctuation, each with its white space reduced to single blanks."""
    sentences: list[str] = []
    start = 0
    text = " ".join(prose.split())
    for end in _SENTENCE_END.finditer(text):
        sentence = text[start : end.end()].rstrip()
        if not _ABBREVIATION.search(sentence):
            sentences.append(sentence)
            start = end.end()
    rest = text[start:].rstrip()
    return [*sentences, rest] if rest else sentences


def _parsed(
    files: Sequence[DataFile],
    read: Callable[[DataFile], list[Any]],
    share_out: Callable[[list[Any]], dict[str, QuestionPool]],
) -> Mapping[str, QuestionPool]:
    """The questions of all files of a source; none where there is no file."""
    content: list[Any] = []
    for file in files:
        try:
            parsed = read(file)
            share_out(parsed)  # on its own, so that the file that is wrong is named
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{file.name} does not have the expected format ({reason}); needed: {SOURCES[file.source]}"
            ) from error
        content += parsed
    return share_out(content) if files else {}


def _squad_articles(file: DataFile) -> list[Any]:
    """Articles with paragraphs, as published; of the hub's rows, a question each, every paragraph is one."""
    if file.path.suffix == ".json" and isinstance(content := parse_json(read_text(file)), dict):
        return list(content["data"])
    return [
        _article(**{name: row.fields[name] for name in ("title", "context", "question", "answers")})
        for row in read_rows(file)
    ]


def _article(title: str, context: str, question: str, answers: Any) -> dict[str, Any]:
    asked = {"question": question, "answers": [{"text": text} for text in answers["text"]]}
    return {"title": title, "paragraphs": [{"context": context, "qas": [asked]}]}


def _hotpotqa_entries(file: DataFile) -> list[Any]:
    return [row.fields for row in read_rows(file)]


def _share_out_essays(sentences: Sequence[str]) -> dict[str, tuple[str, ...]]:
    half, three_quarters = len(sentences) // 2, len(sentences) * 3 // 4
    stretches = (sentences[:half], sentences[half:three_quarters], sentences[three_quarters:])
    spread = in_several(set(stretch) for stretch in stretches)
    return {
        split: tuple(s for s in stretch if s not in spread or len(s.split()) < MIN_SENTENCE_WORDS)
        for split, stretch in zip(SPLITS, stretches, strict=True)
    }


def _share_out_squad(articles: list[Any]) -> dict[str, QuestionPool]:
    paragraphs: dict[str, list[str]] = {split: [] for split in SPLITS}
    questions: dict[str, list[Question]] = {split: [] for split in SPLITS}
    by_title: dict[str, list[Any]] = defaultdict(list)
    for article in articles:
        by_title[article["title"]] += article["paragraphs"]
    for title, listed in by_title.items():
        split = split_of(title)
        contexts = list(dict.fromkeys(paragraph["context"] for paragraph in listed))
        paragraphs[split].extend(contexts)
        for paragraph in listed:
            near = tuple(context for context in contexts if context != paragraph["context"])
            questions[split].extend(
                Question(
                    text=asked["question"],
                    answers=tuple(dict.fromkeys(answer["text"] for answer in asked["answers"])),
                    gold=(paragraph["context"],),
                    near=near,
                )
                for asked in paragraph["qas"]
                if asked["answers"] and not asked.get("is_impossible", False)
            )
    return _pools(questions, paragraphs)


def _share_out_hotpotqa(content: list[Any]) -> dict[str, QuestionPool]:
    owned: dict[str, dict[str, str]] = {split: {} for split in SPLITS}  # paragraphs by title
    entries = [(_hotpotqa_paragraphs(entry), entry) for entry in content]
    identity = [str(entry.get("_id") or entry.get("id") or entry["question"]) for entry in content]
    golden = [_hotpotqa_gold_titles(entry) & set(texts) for texts, entry in entries]
    for name, titles, (texts, _) in zip(identity, golden, entries, strict=True):
        owned[split_of(name)].update({title: text for title, text in texts.items() if title in titles})
    gold_titles = {title for titles in golden for title in titles}
    for texts, _ in entries:
        for title, text in texts.items():  # in the file's order, which is the same in every process
            if title not in gold_titles:
                owned[split_of(title)].setdefault(title, text)
    questions: dict[str, list[Question]] = {split: [] for split in SPLITS}
    for name, titles, (texts, entry) in zip(identity, golden, entries, strict=True):
        split = split_of(name)
        near = (text for title, text in texts.items() if title not in titles and title in owned[split])
        if titles:
            questions[split].append(
                Question(
                    text=entry["question"],
                    answers=(entry["answer"],),
                    gold=tuple(texts[title] for title in texts if title in titles),
                    near=tuple(near),
                )
            )
    return _pools(questions, {split: list(owned[split].values()) for split in SPLITS})


def _hotpotqa_paragraphs(entry: Any) -> dict[str, str]:
    """Paragraphs by title; the hub's export nests columns where the published file nests pairs."""
    context = entry["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
    return {title: f"{title}\n{''.join(sentences)}" for title, sentences in pairs}


def _hotpotqa_gold_titles(entry: Any) -> set[str]:
    facts = entry["supporting_facts"]
    return set(facts["title"]) if isinstance(facts, dict) else {title for title, _ in facts}


def _pools(
    questions: Mapping[str, Sequence[Question]], documents: Mapping[str, Sequence[str]]
) -> dict[str, QuestionPool]:
    """Pools without any paragraph or question that two splits would share."""
    shared = in_several(set(documents[split]) for split in SPLITS)
    shared_questions = in_several({question.text for question in questions[split]} for split in SPLITS)
    return {
        split: QuestionPool(
            questions=tuple(
                replace(question, near=tuple(text for text in question.near if text not in shared))
                for question in questions[split]
                if question.text not in shared_questions and not shared.intersection(question.gold)
            ),
            documents=tuple(dict.fromkeys(text for text in documents[split] if text not in shared)),
        )
        for split in SPLITS
    }
