"""A report as one web page that needs nothing else: figures are inside it, and no script or address is.

All text from the catalog is escaped. Ids of the catalog and commands are set as code, so that they can be copied whole.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from dashboards.report.document import CODE, Block, Document, Picture, Prose, Section, Table

_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --ground: #fff; --ink: #222; --faint: #5c5c5c; --rule: #ddd; --tint: #f4f4f2; --mark: #a04000;
  --link: #0b57a4; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #1c1c1e; --ink: #e8e8e8; --faint: #b0b0b0; --rule: #444; --tint: #28282b; --mark: #f2a65a;
    --link: #8ab8f0; }
}
body { font: 16px/1.5 system-ui, sans-serif; background: var(--ground); color: var(--ink); margin: 0 auto;
  padding: 1.5rem; max-width: 68rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.8rem 0 0.6rem; padding-top: 0.8rem; border-top: 2px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.6rem 0 0.3rem; }
p, li { max-width: 48rem; }
a { color: var(--link); }
nav ol { columns: 2 20rem; padding-left: 1.4rem; }
ul { padding-left: 1.4rem; }
.summary { background: var(--tint); border-radius: 6px; padding: 0.7rem 1rem; }
.summary p { margin: 0.3rem 0; }
.missing { color: var(--mark); }
.claim { font-weight: 600; }
.caption, .note { color: var(--faint); font-size: 0.9rem; margin: 0.3rem 0; }
figure { margin: 0.6rem 0 1.2rem; }
figure img { max-width: 100%; height: auto; display: block; background: #fff; border-radius: 4px; }
details { margin: 0.4rem 0; }
summary { cursor: pointer; color: var(--link); font-size: 0.9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.82rem; font-variant-numeric: tabular-nums; margin: 0.2rem 0; }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0; }
th, td { padding: 0.2rem 0.9rem 0.2rem 0; border-top: 1px solid var(--rule); vertical-align: top; text-align: left; }
thead th { border-top: none; border-bottom: 1px solid var(--faint); }
th.figure, td.figure { text-align: right; }
td.figure { white-space: nowrap; }
tbody th { font-weight: 500; white-space: nowrap; }
code { font: 0.92em ui-monospace, monospace; overflow-wrap: anywhere; }
td code { white-space: nowrap; }
.origin { color: var(--faint); font-size: 0.8rem; border-left: 3px solid var(--rule); padding-left: 0.7rem;
  margin: 1.4rem 0 0; max-width: none; }
@media print { details > * { display: block; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
</style>
</head>
<body>
<h1>$title</h1>
<div class="summary">$summary</div>
<nav aria-label="Contents"><ol>$contents</ol></nav>
<main>
$sections
</main>
</body>
</html>
"""
)


def render_report_page(document: Document) -> str:
    """The page as text."""
    return _PAGE.substitute(
        title=escape(document.title),
        summary="".join(f"<p>{_marked(line)}</p>" for line in document.summary),
        contents="".join(f'<li><a href="#{part.anchor}">{escape(part.title)}</a></li>' for part in document.sections),
        sections="\n".join(_section(part, place) for place, part in enumerate(document.sections, start=1)),
    )


def _section(section: Section, place: int) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return (
        f'<section id="{section.anchor}">\n<h2>{place}. {escape(section.title)}</h2>\n{blocks}\n'
        f"{_origin(section.origin)}\n</section>"
    )


def _block(block: Block) -> str:
    if isinstance(block, Prose):
        return _prose(block)
    return _table(block) if isinstance(block, Table) else _picture(block)


def _prose(block: Prose) -> str:
    if block.kind == "heading":
        return f"<h3>{_marked(block.lines[0])}</h3>"
    kind = "" if block.kind == "plain" else f' class="{block.kind}"'
    if len(block.lines) == 1:
        return f"<p{kind}>{_marked(block.lines[0])}</p>"
    return f"<ul{kind}>{''.join(f'<li>{_marked(line)}</li>' for line in block.lines)}</ul>"


def _picture(block: Picture) -> str:
    source = f"data:image/png;base64,{b64encode(block.png).decode()}"
    numbers = "".join(_table(table) for table in block.tables)
    return (
        f'<h3>{escape(block.title)}</h3>\n<figure><img src="{source}" alt="{escape(block.alt)}">'
        f'<figcaption class="caption">{_marked(block.caption)}</figcaption></figure>'
        + (f"\n<details><summary>The numbers of this figure</summary>{numbers}</details>" if numbers else "")
    )


def _table(block: Table) -> str:
    def cell(place: int, text: str, names: str) -> str:
        kind = ' class="figure"' if place >= block.num_labels else ""
        return f'<th{kind} scope="{names}">{_marked(text)}</th>' if names else f"<td{kind}>{_marked(text)}</td>"

    head = "".join(cell(place, name, "col") for place, name in enumerate(block.columns))
    rows = "".join(
        f"<tr>{''.join(cell(place, text, '' if place else 'row') for place, text in enumerate(row))}</tr>"
        for row in block.rows
    )
    note = f'<p class="note">{_marked(block.note)}</p>' if block.note else ""
    return (
        f'<div class="wide"><table><caption>{_marked(block.title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )


def _origin(origin: Mapping[str, Sequence[str]]) -> str:
    parts = (
        f"{escape(words)} {', '.join(f'<code>{escape(name)}</code>' for name in ids)}"
        for words, ids in origin.items()
        if ids
    )
    return f'<p class="origin">Lineage of this section: {"; ".join(parts)}.</p>'


def _marked(text: str) -> str:
    return CODE.sub(lambda match: f"<code>{match['code'] or match['id']}</code>", escape(text))
