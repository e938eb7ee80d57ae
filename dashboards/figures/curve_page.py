"""Budget curves as one web page that needs nothing else: plotly.js and every point are inside it.

The page holds one *view* for each panel and shows one at a time; the menus offer only what exists. A method that is
hidden in the legend stays hidden when another view is chosen.
"""

from collections.abc import Sequence
from typing import Any

from plotly.offline import get_plotlyjs

from dashboards.figures.curves import draw_panel
from dashboards.figures.series import Panel, band_note, direction, split_full, task_label
from dashboards.figures.styles import metric_label, setting_label
from dashboards.rendering.pages import render_template

_MENUS = {"benchmark": "Benchmark", "setting": "Setting", "metric": "Metric", "task": "Task"}


def render_page(panels: Sequence[Panel], title: str) -> str:
    """The page as text; its views lie as JSON in the element `views`."""
    return render_template(
        "budget_curves.html",
        title=title,
        plotlyjs=get_plotlyjs(),
        menus=_MENUS,
        views=[_view(panel) for panel in panels],
    )


def _view(panel: Panel) -> dict[str, Any]:
    kept, full_note = split_full(panel)
    choice = {name: getattr(panel, name) for name in _MENUS}
    labels = (panel.benchmark, setting_label(panel.setting), metric_label(panel.metric), task_label(panel.task))
    notes = [direction(panel.metric), full_note, band_note([panel])]
    return {
        "choice": choice,
        "words": dict(zip(_MENUS, labels, strict=True)),
        "note": "; ".join(filter(None, notes)),
        "figure": draw_panel(kept).to_plotly_json(),
    }
