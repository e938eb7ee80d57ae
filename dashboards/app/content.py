"""What a page consists of, or why there is nothing to show, and either as HTML within the frame of all pages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dashboards.app.selection import Selection
from dashboards.rendering.pages import render_template

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


class Nothing(Exception):
    """A page has nothing to show: names the missing data and the command that makes it."""

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(missing)
        self.missing = missing
        self.remedy = remedy


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        template: name of its template, which places the rest.
        content: what the template is given.
        status: HTTP's.
    """

    template: str
    content: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


def render(page: Page, name: str, selection: Selection, *, home: str) -> str:
    """A page as text.

    Args:
        page: what it shows.
        name: which page it is; its place in the navigation.
        selection: its choices.
        home: the folder that it is about.
    """
    carried = Selection(asked={}, menus=[menu for menu in selection.menus if menu.name in _CARRIED])
    return render_template(
        page.template,
        page_name=name,
        navigation=[(key, words, carried.url(key)) for key, words in NAVIGATION.items()],
        selection=selection,
        home=home,
        **page.content,
    )
