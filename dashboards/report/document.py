"""What a report is made of, whatever it is written as: sections of prose, tables and figures, each with its origin.

`dashboards.report.page` writes it as HTML, `dashboards.report.markdown` as Markdown.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "–"
BETTER_MARK, WORSE_MARK, UNDECIDED_MARK = "▲", "▼", "·"
MARKS = {"better": BETTER_MARK, "worse": WORSE_MARK, "undecided": UNDECIDED_MARK}
MARKS_NOTE = (
    f"{BETTER_MARK} better, {WORSE_MARK} worse: the paired interval excludes 0; {UNDECIDED_MARK} undecided: it does "
    "not, or there are too few samples"
)
ID = re.compile(r"\b[a-z]+(?:_[a-z]+)*-[0-9a-f]{16}\b")
"""An id of the catalog: of a run, or of an artifact."""
CODE = re.compile(rf"`(?P<code>[^`\n]+)`|(?P<id>{ID.pattern})")
"""What is set as code: what stands between backticks, and ids."""


@dataclass(frozen=True, kw_only=True)
class Prose:
    """A paragraph, or a list of lines.

    Attributes:
        lines: one is a paragraph; several are the items of a list.
        kind: "plain"; "heading" of what follows; "claim" for what is claimed or not; "missing" for what this run has no
            data for.
    """

    lines: tuple[str, ...]
    kind: str = "plain"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text.

    Attributes:
        title: what it shows.
        columns: names of the columns.
        rows: cells, as many a row as there are columns.
        note: what marks and brackets mean, or nothing.
        num_labels: leading columns that name the row; the others are figures and stand at the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    num_labels: int = 1


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure, and the numbers that it is drawn from.

    Attributes:
        png: a PNG file's bytes.
        title: what it shows.
        caption: how to read it.
        alt: the same for who cannot see it.
        tables: its numbers.
    """

    png: bytes
    title: str
    caption: str
    alt: str
    tables: tuple[Table, ...] = ()


Block = Prose | Table | Picture


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question and what answers it.

    Attributes:
        anchor: name of the section within the page.
        title: the heading.
        blocks: in the order of reading.
        origin: what it was made of: words to ids of the catalog.
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
    """Plain words."""
    return Prose(lines=lines)


def missing(what: str, remedy: str) -> Prose:
    """A line that says what this run has no data for, and what makes it."""
    return Prose(lines=(f"Not in this run: {what}. {remedy}",), kind="missing")


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, note: str = "", num_labels: int = 1
) -> Table:
    """Make a table of any sequences.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """
    cells = tuple(tuple(row) for row in rows)
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: {len(row)} cells for {len(columns)} columns")
    return Table(title=title, columns=tuple(columns), rows=cells, note=note, num_labels=num_labels)


def is_number(value: Any) -> bool:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def number(value: float | None, *, signed: bool = False) -> str:
    """Three significant digits; whole numbers from 1000 on; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    sign = "+" if signed else ""
    return f"{value:{sign},.0f}" if abs(value) >= 999.5 else f"{value:{sign}.3g}"


def interval(low: float | None, high: float | None, *, signed: bool = False) -> str:
    """The ends in brackets, or that there is none."""
    if not (is_number(low) and is_number(high)):
        return "[no interval]"
    return f"[{number(low, signed=signed)}, {number(high, signed=signed)}]"


def with_interval(value: float | None, low: float | None, high: float | None, *, signed: bool = False) -> str:
    """`0.312 [0.25, 0.38]`."""
    return f"{number(value, signed=signed)} {interval(low, high, signed=signed)}"


def percent(share: float) -> str:
    """A share in whole percent, with a decimal under ten."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    if seconds < 3599.5:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def sentence(text: str) -> str:
    """The text with a capital first letter, and all else as it is."""
    return text[:1].upper() + text[1:]


def counted(count: int, one: str, several: str = "") -> str:
    """`1 budget`, `2 budgets`."""
    return f"{count} {one if count == 1 else several or one + 's'}"
