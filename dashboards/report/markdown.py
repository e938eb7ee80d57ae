"""A report's words and tables as Markdown (GitHub's tables); of its figures, the numbers."""

from collections.abc import Iterator, Mapping, Sequence

from dashboards.drawing import Figure
from dashboards.report.document import Block, Document, Prose
from dashboards.tables import Table, markdown_table, markdown_text


def render_report_markdown(document: Document) -> str:
    """The report as text."""
    lines = [f"# {markdown_text(document.title)}", *(markdown_text(line) for line in document.summary)]
    for place, section in enumerate(document.sections, start=1):
        lines.append(f"## {place}. {markdown_text(section.title)}")
        for block in section.blocks:
            lines += _block(block)
        lines.append(_origin(section.origin))
    return "\n\n".join(lines) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Prose):
        yield _prose(block)
    elif isinstance(block, Table):
        yield from markdown_table(block)
    else:
        yield from _figure(block)


def _prose(block: Prose) -> str:
    if block.kind == "heading":
        return f"### {markdown_text(block.lines[0])}"
    if len(block.lines) == 1:
        return markdown_text(block.lines[0])
    return "\n".join(f"- {markdown_text(line)}" for line in block.lines)


def _figure(block: Figure) -> Iterator[str]:
    yield f"### {markdown_text(block.title)}"
    for table in block.tables:
        yield from markdown_table(table)


def _origin(origin: Mapping[str, Sequence[str]]) -> str:
    parts = (f"{words} {', '.join(f'`{name}`' for name in ids)}" for words, ids in origin.items() if ids)
    return f"Lineage of this section: {'; '.join(parts)}."
