"""A table as rows of cells, independent of its format: HTML (`templates/parts.html`) or Markdown (`markdown_table`)."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dashboards.rendering.formats import CODE

_SPECIAL = re.compile(r"[\\`*|<>]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|\](?=\()")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Text with a URL."""

    text: str
    url: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        name: one word, which is also the class of its look.
        reason: text below it; may be empty.
    """

    name: str
    reason: str | Link = ""


Cell = str | Link | Outcome | Sequence[Link]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table.

    Attributes:
        title: above it; may be empty.
        columns: names of the columns.
        rows: cells, as many a row as there are columns.
        note: the meaning of marks and brackets; may be empty.
        numeric: places of the columns that are aligned to the right.
        long: places of the columns whose texts may take several lines.
        folded: whether its rows are hidden until the reader opens it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    numeric: frozenset[int] = frozenset()
    long: frozenset[int] = frozenset()
    folded: bool = False


def table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[Cell]],
    *,
    note: str = "",
    num_labels: int = 1,
    numeric: Iterable[int] | None = None,
    long: Iterable[int] = (),
    folded: bool = False,
) -> Table:
    """Make a table of any sequences.

    Args:
        title: as in `Table`.
        columns: as in `Table`.
        rows: as in `Table`.
        note: as in `Table`.
        num_labels: leading columns that name the row; the others are numeric.
        numeric: as in `Table`, where the numeric columns are not the last ones.
        long: as in `Table`.
        folded: as in `Table`.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """
    names, cells = tuple(columns), tuple(tuple(row) for row in rows)
    for row in cells:
        if len(row) != len(names):
            raise ValueError(f"table {title!r}: {len(row)} cells for {len(names)} columns")
    return Table(
        title=title,
        columns=names,
        rows=cells,
        note=note,
        numeric=frozenset(range(num_labels, len(names)) if numeric is None else numeric),
        long=frozenset(long),
        folded=folded,
    )


def markdown_table(table: Table) -> Iterator[str]:
    """The paragraphs of a table in GitHub's form; links are their text."""
    yield f"**{markdown_text(table.title)}**"
    rule = ["---:" if place in table.numeric else "---" for place in range(len(table.columns))]
    rows = [map(markdown_text, map(_cell_text, row)) for row in table.rows]
    yield "\n".join(f"| {' | '.join(cells)} |" for cells in (map(markdown_text, table.columns), rule, *rows))
    if table.note:
        yield markdown_text(table.note)


def _cell_text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Link):
        return cell.text
    return cell.name if isinstance(cell, Outcome) else ", ".join(link.text for link in cell)


def markdown_text(text: str) -> str:
    """Text with Markdown's characters escaped; ids and commands are set as code."""
    parts, start = [], 0
    for match in CODE.finditer(text):
        parts += [_escaped(text[start : match.start()]), f"`{match['code'] or match['id']}`"]
        start = match.end()
    return "".join([*parts, _escaped(text[start:])])


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", " ".join(text.split("\n")))
