"""A report's words and tables as Markdown (GitHub's tables); of its figures, the numbers."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dashboards.report.document import CODE, Block, Document, Picture, Prose, Table

_SPECIAL = re.compile(r"[\\`*|<>]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|\](?=\()")


def render_report_markdown(document: Document) -> str:
    """The report as text."""
    lines = [f"# {_plain(document.title)}", *(_plain(line) for line in document.summary)]
    for place, section in enumerate(document.sections, start=1):
        lines.append(f"## {place}. {_plain(section.title)}")
        for block in section.blocks:
            lines += _block(block)
        lines.append(_origin(section.origin))
    return "\n\n".join(lines) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Prose):
        yield _prose(block)
    elif isinstance(block, Table):
        yield from _table(block)
    else:
        yield from _picture(block)


def _prose(block: Prose) -> str:
    if block.kind == "heading":
        return f"### {_plain(block.lines[0])}"
    if len(block.lines) == 1:
        return _plain(block.lines[0])
    return "\n".join(f"- {_plain(line)}" for line in block.lines)


def _picture(block: Picture) -> Iterator[str]:
    yield f"### {_plain(block.title)}"
    for table in block.tables:
        yield from _table(table)


def _table(block: Table) -> Iterator[str]:
    yield f"**{_plain(block.title)}**"
    rule = ["---" if place < block.num_labels else "---:" for place in range(len(block.columns))]
    yield "\n".join(_row(cells) for cells in (map(_plain, block.columns), rule, *(map(_plain, r) for r in block.rows)))
    if block.note:
        yield _plain(block.note)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _origin(origin: Mapping[str, Sequence[str]]) -> str:
    parts = (f"{words} {', '.join(f'`{name}`' for name in ids)}" for words, ids in origin.items() if ids)
    return f"Lineage of this section: {'; '.join(parts)}."


def _plain(text: str) -> str:
    """Text whose characters mean nothing to Markdown; ids and commands are set as code."""
    parts, start = [], 0
    for match in CODE.finditer(text):
        parts += [_escaped(text[start : match.start()]), f"`{match['code'] or match['id']}`"]
        start = match.end()
    return "".join([*parts, _escaped(text[start:])])


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", " ".join(text.split("\n")))
