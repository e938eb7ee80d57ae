"""LongBench's passage retrieval (English, Chinese) and GovReport (arXiv 2308.14508; THUDM/LongBench, `config/`).

Prompts and tokens to generate are LongBench's. Departures: the last words of the prompt ("The answer is:") begin the
assistant's turn, as RULER's do; and a sample that does not fit the length is left out and counted (there: its middle is
cut out, and with it the paragraph that is looked for).

The public files are test parts of their own. They are shared out all the same: by their context, or their report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvpolicy.benchmarks.file_rows import Row, read_rows
from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.splits import share_out
from kvpolicy.benchmarks.task import TaskInfo
from kvpolicy.text.encoded_sample import count_all_tokens
from kvpolicy.text.sample import Sample

BENCHMARK = "longbench"
VERSION = "1"


def _info(task: str, metric: str, max_new_tokens: int, description: str) -> TaskInfo:
    return TaskInfo(
        benchmark=BENCHMARK,
        version=VERSION,
        task=task,
        source=task,
        metrics=(metric,),
        max_new_tokens=max_new_tokens,
        description=description,
    )


TASKS = (
    _info("passage_retrieval_en", "retrieval", 32, "Which of 30 paragraphs an abstract is of."),
    _info("passage_retrieval_zh", "retrieval", 32, "The same in Chinese."),
    _info("gov_report", "rouge_l", 512, "A one-page summary of a report by a government agency."),
)


@dataclass(frozen=True, kw_only=True)
class _Template:
    """A prompt of LongBench, in the parts of a sample."""

    context: str
    question: str
    answer_prefix: str
    blank: str = " "  # between the prefix and the answer


_TEMPLATES: Mapping[str, _Template] = {
    "passage_retrieval_en": _Template(
        context="Here are 30 paragraphs from Wikipedia, along with an abstract. "
        "Please determine which paragraph the abstract is from.\n\n{context}\n\n",
        question="The following is an abstract.\n\n{input}\n\n"
        "Please enter the number of the paragraph that the abstract is from. "
        'The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n',
        answer_prefix="The answer is:",
    ),
    "passage_retrieval_zh": _Template(
        context="以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n",
        question='下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n',
        answer_prefix="答案是：",
        blank="",
    ),
    "gov_report": _Template(
        context="You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\n",
        question="Now, write a one-page summary of the report.\n\n",
        answer_prefix="Summary:",
    ),
}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A row: the text that is read, the abstract that is asked about (or nothing), and the accepted answers."""

    context: str
    input: str
    answers: tuple[str, ...]


def long_samples(request: SampleRequest) -> Iterator[Sample]:
    """The samples of a split in an order that the seed draws, until they run out.

    Raises:
        InputError: A row of a file is broken.
    """
    entries: dict[tuple[str, str], _Entry] = {}
    for file in request.files.of(request.task):
        for row in read_rows(file):
            entry = _read(row)
            if not entry.context.strip() or not entry.answers:
                request.report("row with an empty text or reference")
            else:
                request.report("row that came before", int((entry.context, entry.input) in entries))
                entries.setdefault((entry.context, entry.input), entry)
    shared, num_shared = share_out(
        entries.values(), owner=lambda entry: entry.context, parts=lambda entry: _traced(entry.context)
    )
    request.report("row with a text that another split has", num_shared)
    of_split = sorted(shared[request.split], key=lambda entry: (entry.context, entry.input))
    request.rng("order").shuffle(of_split)
    index = 0
    for entry in of_split:
        sample = _sample(request, entry, index)
        if (tokens := count_all_tokens(sample, request.tokenizer)) <= request.length_tokens:
            yield sample
            index += 1
        else:
            request.report(f"sample that needs {-(-tokens // 1024)}K tokens")


def fingerprint(sample: Sample) -> Mapping[str, frozenset[str]]:
    """Read back from a prompt the texts that no other split may have: paragraphs, or the report."""
    head, _, tail = _TEMPLATES[sample.task].context.partition("{context}")
    return {"text": _traced(sample.context.removeprefix(head).removesuffix(tail))}


def _read(row: Row) -> _Entry:
    if "report" in row.fields:
        return _Entry(context=row.text("report"), input="", answers=_filled((row.text("summary"),)))
    if row.fields.get("dataset", row.source) != row.source:
        raise row.error(f"it is of {row.fields['dataset']}, expected {row.source}")
    answers = _filled(row.texts("answers"))
    if row.source.startswith("passage_retrieval") and answers and not any(map(_has_number, answers)):
        raise row.error(f"answers is {list(answers)}, expected the number of a paragraph")
    return _Entry(context=row.text("context"), input=row.text("input"), answers=answers)


def _filled(answers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(answer.strip() for answer in answers if answer.strip())


def _has_number(answer: str) -> bool:
    return any(character.isdecimal() for character in answer)


def _sample(request: SampleRequest, entry: _Entry, index: int) -> Sample:
    template = _TEMPLATES[request.task]
    (info,) = (info for info in TASKS if info.task == request.task)
    return request.sample(
        index,
        context=template.context.replace("{context}", entry.context),
        question=template.question.replace("{input}", entry.input),
        answer_prefix=template.answer_prefix,
        answer=f"{template.blank}{entry.answers[0]}",
        references=entry.answers,
        max_new_tokens=info.max_new_tokens,
    )


def _traced(context: str) -> frozenset[str]:
    """Paragraphs without their numbers; a report as a whole."""
    paragraphs = context.split("\n\n")
    numbered = [_unnumbered(paragraph) for paragraph in paragraphs if _unnumbered(paragraph) != paragraph]
    return frozenset(numbered or [context.strip()])


def _unnumbered(paragraph: str) -> str:
    for label in ("Paragraph ", "段落"):
        number, colon, text = paragraph.removeprefix(label).replace("：", ":", 1).partition(":")
        if paragraph.startswith(label) and colon and number.strip().isdigit():
            return text.strip()
    return paragraph.strip()
