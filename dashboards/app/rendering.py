"""Pages as HTML. All text is escaped by the templates; figures lie in the page as JSON that a script draws."""

import functools

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dashboards.app.content import Cell, Link, Outcome, Page
from dashboards.app.selection import Selection

NAVIGATION = {
    "curves": "Budget curves",
    "heads": "Heads",
    "tokens": "Tokens",
    "similarity": "Head similarity",
    "lineage": "Lineage",
    "runs": "Runs",
}
_CARRIED = ("model", "evaluation")
"""Choices that go along to another page."""


def render(page: Page, name: str, selection: Selection, *, home: str) -> str:
    """A page as text.

    Args:
        page: what it shows.
        name: which page it is; its place in the navigation.
        selection: its choices.
        home: the folder that it is about.
    """
    carried = Selection(asked={}, menus=[menu for menu in selection.menus if menu.name in _CARRIED])
    return (
        _environment()
        .get_template(page.template)
        .render(
            page_name=name,
            navigation=[(key, words, carried.url(key)) for key, words in NAVIGATION.items()],
            selection=selection,
            home=home,
            **page.content,
        )
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dashboards.app"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"drawing": _drawing, "cell": _cell, "marked": _marked}
    return environment


def _drawing(figure: go.Figure) -> Markup:
    """A figure as JSON that nothing in it can break out of."""
    return Markup(figure.to_json().replace("<", "\\u003c"))  # no markup is left in it


def _marked(text: str) -> Markup:
    """A text in which commands, between backticks, are set as such."""
    parts = enumerate(text.split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(part) if odd % 2 else part for odd, part in parts)


def _cell(cell: Cell) -> Markup:
    """A cell of a table."""
    if isinstance(cell, Link):
        return Markup('<a href="{}">{}</a>').format(cell.url, cell.text)
    if isinstance(cell, Outcome):
        reason = Markup('<div class="reason">{}</div>').format(_cell(cell.reason)) if cell.reason else ""
        return Markup('<span class="tag {0}">{0}</span>{1}').format(cell.name, reason)
    if isinstance(cell, str):
        return Markup("{}").format(cell)
    return Markup(" ").join(_cell(part) for part in cell)
