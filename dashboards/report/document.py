"""The parts of a report, independent of its format: sections of prose, tables and figures, each with its origin.

`templates/report.html` writes it as HTML, `templates/report.md` as Markdown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboards.figures.drawing import Figure
from dashboards.rendering.table import Table
from kvpolicy.results.comparisons import BETTER, UNDECIDED, WORSE

BETTER_MARK, WORSE_MARK, UNDECIDED_MARK = "▲", "▼", "·"
MARKS = {BETTER: BETTER_MARK, WORSE: WORSE_MARK, UNDECIDED: UNDECIDED_MARK}
MARKS_NOTE = (
    f"{BETTER_MARK} better, {WORSE_MARK} worse: the paired interval excludes 0; {UNDECIDED_MARK} undecided: it does "
    "not, or there are too few samples"
)


@dataclass(frozen=True, kw_only=True)
class Prose:
    """A paragraph, or a list of lines.

    Attributes:
        lines: one is a paragraph; several are the items of a list.
        kind: "plain"; "heading"; "claim" for the outcome of a comparison; "missing" for data that the run lacks.
    """

    lines: tuple[str, ...]
    kind: str = "plain"


Block = Prose | Table | Figure


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question and its answer.

    Attributes:
        anchor: name of the section within the page.
        title: the heading.
        blocks: in the order of reading.
        origin: its sources: words to ids of the catalog.
    """

    anchor: str
    title: str
    blocks: tuple[Block, ...]
    origin: Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    summary: tuple[str, ...]
    sections: tuple[Section, ...]


def prose(*lines: str) -> Prose:
    """A plain paragraph, or a list of lines."""
    return Prose(lines=lines)


def missing(what: str, remedy: str) -> Prose:
    """A line that names missing data and the command that makes it."""
    return Prose(lines=(f"Not in this run: {what}. {remedy}",), kind="missing")
