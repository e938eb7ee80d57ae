"""Read back from a RULER prompt its parts that no other split may have.

This reads the finished text instead of asking the writers, so that a mistake in how they draw cannot hide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvpolicy.benchmarks.ruler.generator import sample_seed
from kvpolicy.benchmarks.ruler.tasks import BENCHMARK, ruler_task
from kvpolicy.benchmarks.ruler.texts import MIN_SENTENCE_WORDS, split_sentences
from kvpolicy.errors import InputError
from kvpolicy.text.sample import Sample

_NEEDLE = re.compile(r"One of the special magic \w+ for (\S+) is: (\S+?)\.(?=\s|$)")
_ASSIGNMENT = re.compile(r"\bVAR ([A-Z]+) = (?:VAR )?(\w+)")
_NUMBERED = re.compile(r"\b\d+\. (\S+)")
_CODE = re.compile(r"\b[a-z]{6}\b")
_DOCUMENT = re.compile(r"^Document \d+:\n", re.MULTILINE)


def fingerprint(sample: Sample) -> Mapping[str, frozenset[str]]:
    """The traceable parts of a sample, by what they are: its seed, keys, needles, words, texts and questions.

    Raises:
        InputError: The sample's id is not one of RULER's.
    """
    parts = {"seed": {str(_seed(sample.sample_id))}, **_text_parts(sample)}
    return {kind: frozenset(members) for kind, members in parts.items()}


def _seed(sample_id: str) -> int:
    """The seed that made a sample, from its id."""
    fields = sample_id.split("/")
    if len(fields) != 6 or fields[0] != BENCHMARK or not all(number.lstrip("-").isdigit() for number in fields[3:]):
        raise InputError(f"sample id {sample_id!r} is not of the form {BENCHMARK}/task/split/seed/index/length_tokens")
    _, task, split, seed, index, length = fields
    return sample_seed(task=task, split=split, seed=int(seed), index=int(index), length_tokens=int(length))


def _text_parts(sample: Sample) -> Mapping[str, set[str]]:
    task = ruler_task(sample.task)
    body = sample.context
    if task.kind == "niah":
        needles = _NEEDLE.findall(body)
        text = {"text": _essay_sentences(body)} if task.haystack == "essay" else {}
        return {"key": {key for key, _ in needles}, "needle": {value for _, value in needles}, **text}
    if task.kind == "vt":
        needles = _ASSIGNMENT.findall(body)
        return {"key": {name for name, _ in needles}, "needle": {source for _, source in needles if source.isdigit()}}
    if task.kind == "cwe":
        return {"word": set(_NUMBERED.findall(body))}
    if task.kind == "fwe":
        coded = body[body.index("coded words. ") + len("coded words. ") :]
        return {"word": set(_CODE.findall(coded))}
    documents = {document.strip() for document in _DOCUMENT.split(body)[1:]}
    return {"text": documents, "question": {sample.question}}


def _essay_sentences(context: str) -> set[str]:
    """The whole sentences of the haystack; the last one may be cut short and does not count."""
    haystack = _NEEDLE.sub("", context[context.index("\n") :])
    return {sentence for sentence in split_sentences(haystack)[:-1] if len(sentence.split()) >= MIN_SENTENCE_WORDS}
