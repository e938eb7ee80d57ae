"""The outside texts that seven of RULER's tasks need, read from files that the user names and shared out to splits.

No text reaches two splits. Essays are cut into three stretches of neighbouring sentences (a half, a quarter, a
quarter), and a sentence that occurs in more than one is left out. SQuAD articles belong to a split by their titles.
HotpotQA questions belong to a split by their ids and carry their gold paragraphs along; every other paragraph belongs
to a split by its title. What two splits would share is left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpolicy.benchmarks.ruler.tasks import RulerTask, TextSource
from kvpolicy.benchmarks.ruler.vocabulary import SPLITS, split_of
from kvpolicy.errors import InputError

SOURCES: Mapping[TextSource, str] = {
    "essays": "one or more plain text files of prose, such as a book of Project Gutenberg "
    "(RULER's own are Paul Graham's essays, from paulgraham.com/articles.html)",
    "squad": "the SQuAD v2.0 json file, from rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
    "hotpotqa": "the HotpotQA dev distractor json file, "
    "from curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
}
"""What each text is and where it comes from."""

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
        digests: SHA-256 of every file that was read, by its path as it was given.
    """

    essays: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    squad: Mapping[str, QuestionPool] = field(default_factory=dict)
    hotpotqa: Mapping[str, QuestionPool] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def sentences(self, task: RulerTask, split: str) -> tuple[str, ...]:
        """Essay sentences of a split.

        Raises:
            InputError: No essays were given, or too few.
        """
        if not self.essays:
            raise missing_text(task)
        sentences = self.essays.get(split, ())
        if not sentences:
            raise InputError(f"ruler/{task.name}: the essays hold no sentences for the {split} split: give more text")
        return sentences

    def questions(self, task: RulerTask, split: str) -> QuestionPool:
        """Questions of a split for `qa_1` or `qa_2`.

        Raises:
            InputError: The file was not given, or holds no question for the split.
        """
        by_split = self.squad if task.text == "squad" else self.hotpotqa
        if not by_split:
            raise missing_text(task)
        pool = by_split.get(split)
        if pool is None or not pool.questions:
            raise InputError(f"ruler/{task.name}: the {task.text} file holds no question for the {split} split")
        return pool


def missing_text(task: RulerTask) -> InputError:
    """The error for a task whose text was not given: what is needed, and how to get it."""
    assert task.text is not None
    return InputError(f"ruler/{task.name} needs a text that was not given: set {task.text} to {SOURCES[task.text]}")


def read_texts(
    *, essays: Sequence[Path | str] = (), squad: Path | str | None = None, hotpotqa: Path | str | None = None
) -> RulerTexts:
    """Reads the files that the user names.

    Args:
        essays: Plain text files, taken together.
        squad: SQuAD v2.0 json.
        hotpotqa: HotpotQA distractor json, as published or as the hub's export.

    Raises:
        InputError: A file cannot be read or does not have its format.
    """
    digests: dict[str, str] = {}
    prose = "\n\n".join(_read(path, "essays", digests) for path in essays)
    return RulerTexts(
        essays=_share_out_essays(split_sentences(prose)) if essays else {},
        squad=_parsed(squad, "squad", _share_out_squad, digests) if squad is not None else {},
        hotpotqa=_parsed(hotpotqa, "hotpotqa", _share_out_hotpotqa, digests) if hotpotqa is not None else {},
        digests=digests,
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


def _read(path: Path | str, source: TextSource, digests: dict[str, str]) -> str:
    try:
        content = Path(path).read_bytes()
        digests[str(path)] = hashlib.sha256(content).hexdigest()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {source} must be {SOURCES[source]}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text (byte {error.start}); {source} must be {SOURCES[source]}"
        ) from error


def _parsed(
    path: Path | str, source: TextSource, share_out: Any, digests: dict[str, str]
) -> Mapping[str, QuestionPool]:
    text = _read(path, source, digests)
    try:
        pools: Mapping[str, QuestionPool] = share_out(json.loads(text))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path} does not have the expected format ({reason}); needed: {SOURCES[source]}") from error
    return pools


def _share_out_essays(sentences: Sequence[str]) -> dict[str, tuple[str, ...]]:
    half, three_quarters = len(sentences) // 2, len(sentences) * 3 // 4
    stretches = (sentences[:half], sentences[half:three_quarters], sentences[three_quarters:])
    spread = _in_several(set(stretch) for stretch in stretches)
    return {
        split: tuple(s for s in stretch if s not in spread or len(s.split()) < MIN_SENTENCE_WORDS)
        for split, stretch in zip(SPLITS, stretches, strict=True)
    }


def _share_out_squad(content: Any) -> dict[str, QuestionPool]:
    paragraphs: dict[str, list[str]] = {split: [] for split in SPLITS}
    questions: dict[str, list[Question]] = {split: [] for split in SPLITS}
    for article in content["data"]:
        split = split_of(article["title"])
        contexts = list(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
        paragraphs[split].extend(contexts)
        for paragraph in article["paragraphs"]:
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


def _share_out_hotpotqa(content: Any) -> dict[str, QuestionPool]:
    owned: dict[str, dict[str, str]] = {split: {} for split in SPLITS}  # paragraphs by title
    entries = [(_hotpotqa_paragraphs(entry), entry) for entry in content]
    identity = [str(entry.get("_id") or entry.get("id") or entry["question"]) for entry in content]
    golden = [_hotpotqa_gold_titles(entry) & set(texts) for texts, entry in entries]
    for name, titles, (texts, _) in zip(identity, golden, entries, strict=True):
        owned[split_of(name)].update({title: texts[title] for title in titles})
    gold_titles = {title for titles in golden for title in titles}
    for texts, _ in entries:
        for title in texts.keys() - gold_titles:
            owned[split_of(title)].setdefault(title, texts[title])
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
    shared = _in_several(set(documents[split]) for split in SPLITS)
    shared_questions = _in_several({question.text for question in questions[split]} for split in SPLITS)
    return {
        split: QuestionPool(
            questions=tuple(
                Question(
                    text=question.text,
                    answers=question.answers,
                    gold=question.gold,
                    near=tuple(text for text in question.near if text not in shared),
                )
                for question in questions[split]
                if question.text not in shared_questions and not shared.intersection(question.gold)
            ),
            documents=tuple(dict.fromkeys(text for text in documents[split] if text not in shared)),
        )
        for split in SPLITS
    }


def _in_several(sets: Iterable[set[str]]) -> set[str]:
    """Members of more than one set."""
    counts = Counter(member for members in sets for member in members)
    return {member for member, count in counts.items() if count > 1}
