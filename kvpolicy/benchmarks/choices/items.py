"""Multiple-choice items out of the public files of BoolQ, ARC, MMLU and HellaSwag.

Each is read in the form that the hub has, and in flattened ones with a list of choices and the index of the answer.
Items whose answer is withheld (public test parts) or that have none to choose from are left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvpolicy.benchmarks.file_rows import Row, read_rows
from kvpolicy.benchmarks.sample_request import SampleRequest


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question with its options.

    Attributes:
        question: What is asked, or begun, on one line.
        choices: The texts of the options, each on one line.
        answer: Place of the right one.
        passage: What the question is about, on one line; empty for most.
        topic: What the item belongs to: the subject of MMLU, the activity of HellaSwag; empty for others.
        owner: The text whose hash decides the split: items of one owner are never told apart.
    """

    question: str
    choices: tuple[str, ...]
    answer: int
    passage: str = ""
    topic: str = ""
    owner: str


def read_items(request: SampleRequest) -> list[Item]:
    """The items of all files that are named for a task, in their order, each once; what is left out is counted.

    Raises:
        InputError: A row is broken.
    """
    items: dict[tuple[str, str, tuple[str, ...]], Item] = {}
    for file in request.files.of(request.task):
        for row in read_rows(file):
            item = _READERS[request.task](row)
            if item is None:
                request.report("item whose answer is withheld")
                continue
            if not item.question or not all(item.choices) or len(set(item.choices)) < len(item.choices):
                request.report("item with an empty question or an empty or repeated option")
                continue
            name = (item.passage, item.question, item.choices)
            request.report("item that came before", int(name in items))
            items.setdefault(name, item)
    return list(items.values())


def _boolq(row: Row) -> Item | None:
    """BoolQ: `answer` true or false; SuperGLUE's `label` is 1 for true and -1 where it is withheld."""
    value = row.fields.get("answer", row.fields.get("label"))
    if value == -1:
        return None
    if value not in (True, False):
        raise row.error(f"answer is {value!r}, expected true or false")
    passage = _one_line(row.text("passage"))
    return Item(
        question=_one_line(row.text("question")),
        choices=("no", "yes"),
        answer=int(value),
        passage=passage,
        owner=passage,
    )


def _arc(row: Row) -> Item | None:
    """ARC: on the hub `choices` nests texts and labels; the published json nests stem and choices in `question`."""
    asked: Any = row.fields.get("question")
    choices: Any = row.fields.get("choices")
    if isinstance(asked, dict):
        asked, choices = asked.get("stem"), asked.get("choices")
    if not isinstance(asked, str):
        raise row.error("question is missing, expected text")
    if isinstance(choices, dict):
        labels, texts = choices.get("label"), choices.get("text")
    elif isinstance(choices, list) and choices and isinstance(choices[0], dict):
        labels, texts = ([choice.get(part) for choice in choices] for part in ("label", "text"))
    else:
        labels, texts = None, choices
    key = row.fields.get("answerKey", row.fields.get("answer"))
    if key == "":
        return None
    return _asked(row, asked, texts, key, labels=labels)


def _mmlu(row: Row) -> Item | None:
    """MMLU: `answer` is the place of the right choice; its letter will do."""
    return _asked(
        row,
        row.text("question"),
        row.fields.get("choices"),
        row.fields.get("answer"),
        labels=list("ABCD"),
        topic=row.text("subject"),
    )


def _hellaswag(row: Row) -> Item | None:
    """HellaSwag: `label` is text on the hub and a number in the published json lines; empty where it is withheld."""
    label = row.fields.get("label")
    if label in ("", None):
        return None
    begun = _without_marks(row.text("ctx"))
    source = row.fields.get("source_id")
    endings = tuple(map(_without_marks, row.texts("endings")))
    topic = _one_line(str(row.fields.get("activity_label") or ""))
    return _asked(row, begun, list(endings), int(label) if str(label).isdecimal() else label, topic=topic, owner=source)


_READERS: Mapping[str, Callable[[Row], Item | None]] = {
    "boolq": _boolq,
    "arc_challenge": _arc,
    "mmlu": _mmlu,
    "hellaswag": _hellaswag,
}


def _asked(
    row: Row, question: str, choices: Any, key: Any, *, labels: Any = None, topic: str = "", owner: Any = None
) -> Item:
    """An item whose answer is named by its place or by its label."""
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(text, str) for text in choices):
        raise row.error("choices are not there, expected a list of at least two texts")
    if isinstance(key, str) and isinstance(labels, list) and key in labels and len(labels) >= len(choices):
        key = labels.index(key)
    if type(key) is not int or not 0 <= key < len(choices):
        raise row.error(f"the answer is {key!r}, expected one of its {len(choices)} choices")
    line = _one_line(question)
    texts = tuple(map(_one_line, choices))
    whole = "\n".join((line, *texts))
    return Item(question=line, choices=texts, answer=key, topic=topic, owner=str(owner) if owner else whole)


def _without_marks(text: str) -> str:
    """WikiHow's bracketed marks taken out of HellaSwag's texts, as its users do (lm-evaluation-harness, hellaswag)."""
    return _one_line(re.sub(r"\[.*?\]", "", text.replace(" [title]", ". ")))


def _one_line(text: str) -> str:
    return " ".join(text.split())
