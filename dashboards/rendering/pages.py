"""Templates as text: all pages are made by one jinja2 environment, in `dashboards/templates`.

All text is escaped by the templates, in Markdown by a filter; data and figures lie in a page as JSON that its script
reads.
"""

import functools
import json
import re
from base64 import b64encode
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from dashboards.rendering.formats import CODE, ID
from dashboards.rendering.table import Cell, Link, Outcome, markdown_table, markdown_text


def render_template(name: str, **content: Any) -> str:
    """A page as text.

    Args:
        name: of the template.
        content: values for the template.
    """
    return _environment().get_template(name).render(content)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dashboards.rendering"),
        autoescape=select_autoescape(disabled_extensions=["md"], default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "base64": lambda content: b64encode(content).decode(),
        "cell": _cell,
        "data": _data,
        "drawing": _drawing,
        "markdown": markdown_text,
        "markdown_table": lambda table: "\n\n".join(markdown_table(table)),
        "marked": _marked,
    }
    return environment


def _data(value: Any) -> Markup:
    """A value as JSON, escaped so that no text in it ends its script element."""
    text = json.dumps(value, default=str, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))  # no markup is left in it


def _drawing(figure: go.Figure) -> Markup:
    """A figure as JSON, escaped so that no text in it ends its script element."""
    return Markup(figure.to_json().replace("<", "\\u003c"))  # no markup is left in it


def _marked(text: str, what: re.Pattern[str] = CODE) -> Markup:
    """A text in which ids of the catalog, and commands between backticks, are set as code."""
    return Markup(what.sub(lambda match: f"<code>{match[0].strip('`')}</code>", str(escape(text))))


def _cell(cell: Cell) -> Markup:
    """A cell of a table; a backtick in it, such as of a sample's token, is no mark."""
    if isinstance(cell, Link):
        return Markup('<a href="{}">{}</a>').format(cell.url, cell.text)
    if isinstance(cell, Outcome):
        reason = Markup('<div class="reason">{}</div>').format(_cell(cell.reason)) if cell.reason else ""
        return Markup('<span class="tag {0}">{0}</span>{1}').format(cell.name, reason)
    if isinstance(cell, str):
        return _marked(cell, ID)
    return Markup(" ").join(_cell(part) for part in cell)
