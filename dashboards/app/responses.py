"""Pages of the dashboard as HTML, within the frame that all of them share."""

from dashboards.app.content import Page
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
