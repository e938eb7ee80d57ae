"""Budget curves as figures: a picture for a README and a page to explore.

`write_figures` writes both. The picture is drawn here, through matplotlib's objects and never its global state, so
that a task in any thread may call it; the page is `dashboards.figures.curves`'s.
"""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from dashboards.figures.curves import render_page
from dashboards.figures.series import (
    Panel,
    Series,
    ValueAxis,
    band_note,
    direction,
    make_panels,
    split_full,
    value_axis,
    value_label,
)
from dashboards.figures.styles import competed_for, in_order, setting_label, style_of
from kvpolicy.names import BOUNDS, LEARNED, MEAN_TASK
from kvpolicy.results.metrics import LOWER_IS_BETTER
from storage.whole_files import write_whole

PNG_NAME = "budget_curves.png"
HTML_NAME = "budget_curves.html"
_WIDTH_INCHES, _PANEL_WIDTH_INCHES, _PANEL_HEIGHT_INCHES, _DPI = 10.0, 3.3, 3.5, 120
_DASHES: Mapping[str, Literal["-", "--", ":"]] = {"solid": "-", "dash": "--", "dot": ":"}
_GREY = "#444444"


def write_figures(curves: Sequence[Mapping[str, Any]], folder: Path, title: str) -> list[Path]:
    """Writes `budget_curves.png` (means over tasks) and `budget_curves.html` (everything, to choose from).

    Args:
        curves: rows of the catalog's `curves` table, of one evaluation; several seeds of a method become one line.
        folder: where the files go; it is made if it is missing. Each file is replaced in one step.
        title: what stands above both.

    Returns:
        The paths of the picture and of the page.

    Raises:
        ValueError: there are no rows, none over all tasks, or rows that can't be drawn.
    """
    panels = make_panels(curves)
    picture, page = render_picture(panels, title), render_page(panels, title)
    folder.mkdir(parents=True, exist_ok=True)
    return [write_whole(folder / PNG_NAME, picture), write_whole(folder / HTML_NAME, page.encode())]


def render_picture(panels: Sequence[Panel], title: str) -> bytes:
    """The picture as the bytes of a PNG file, 1,200 pixels wide or, with many metrics, more."""
    stream = io.BytesIO()
    draw_picture(panels, title).savefig(stream, format="png", dpi=_DPI)
    return stream.getvalue()


def draw_picture(panels: Sequence[Panel], title: str) -> Figure:
    """One row of panels for each benchmark and setting, one column for each metric, over all tasks.

    The KL over question and answer stands for fidelity; the one over the answer alone is drawn only in its absence, and
    so are analyses where there is anything that methods compete for.

    Raises:
        ValueError: no panel is a mean over tasks.
    """
    means = {(panel.benchmark, panel.setting, panel.metric): panel for panel in panels if panel.task == MEAN_TASK}
    if not means:
        raise ValueError(
            f"no curve points over all tasks: expected rows whose task is '{MEAN_TASK}', got single tasks only"
        )
    places = list(dict.fromkeys((benchmark, setting) for benchmark, setting, _ in means))
    metrics = sorted(dict.fromkeys(metric for _, _, metric in means), key=lambda metric: metric not in LOWER_IS_BETTER)
    metrics = competed_for(metrics) or metrics
    names_benchmark = len({benchmark for benchmark, _ in places}) > 1

    width = max(_WIDTH_INCHES, _PANEL_WIDTH_INCHES * len(metrics))
    figure = Figure(figsize=(width, _PANEL_HEIGHT_INCHES * len(places) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    rows = figure.subfigures(len(places), 1, squeeze=False)[:, 0]
    drawn = []
    for row, (benchmark, setting) in zip(rows, places, strict=True):
        row.suptitle(
            f"{benchmark}, {setting_label(setting)}" if names_benchmark else setting_label(setting), fontsize=11.5
        )
        axes = row.subplots(1, len(metrics), squeeze=False)[0]
        for ax, metric in zip(axes, metrics, strict=True):
            if (benchmark, setting, metric) in means:
                _draw_panel(ax, means[benchmark, setting, metric])
                drawn.append(means[benchmark, setting, metric])
            else:
                ax.set_axis_off()
    _draw_legend(figure, drawn)
    return figure


def _draw_panel(ax: Axes, panel: Panel) -> None:
    """Draw the lines of a panel with their bands and axes, without a legend."""
    kept, note = split_full(panel)
    axis = value_axis(kept)
    for line in reversed(kept.series):  # the learned policy last: on top
        _draw_line(ax, line, axis)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(panel.budgets, list(map(str, panel.budgets)), rotation=45 if _crowded(panel.budgets) else 0)
    ax.set_xlabel("budget (tokens kept per KV head)", fontsize=10, color=_GREY)
    if kept.is_log:
        ax.set_yscale("log")
        ax.set_ylim(bottom=axis.bottom * 0.8)
    else:
        ax.set_ylim(bottom=0)
    ax.set_ylabel(value_label(panel.metric, axis.floor, "\n"), fontsize=10, color=_GREY)
    ax.set_title("\n".join(filter(None, [direction(panel.metric), note])), fontsize=9, color=_GREY, loc="left")
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=10, colors=_GREY)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _draw_line(ax: Axes, line: Series, axis: ValueAxis) -> None:
    style = style_of(line.method)
    budgets = [point.budget for point in line.points]
    order = 4.0 if line.method == LEARNED else 3.0 if line.method in BOUNDS else 2.0
    ax.fill_between(
        budgets,
        [max(point.low, axis.bottom) for point in line.points],
        [max(point.high, axis.bottom) for point in line.points],
        color=style.colour,
        alpha=style.band_alpha,
        linewidth=0,
        zorder=order - 0.5,
    )
    ax.plot(
        budgets,
        [max(point.value, axis.bottom) for point in line.points],
        markersize=7 if line.method == LEARNED else 5,
        zorder=order,
        **_look(line.method),
    )


def _look(method: str) -> dict[str, Any]:
    """What a method's line looks like, in matplotlib's words."""
    style = style_of(method)
    dash = {"linestyle": _DASHES[style.dash], "linewidth": style.width}
    return {"label": method, "color": style.colour, "marker": style.marker, **dash}


def _draw_legend(figure: Figure, panels: Sequence[Panel]) -> None:
    """Name every method of the panels once, below the figure, with a note on the bands."""
    methods = in_order(line.method for panel in panels for line in panel.series)
    handles = [Line2D([], [], markersize=6, **_look(method)) for method in methods]
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(6, len(handles)),
        fontsize=10.5,
        frameon=False,
        title=band_note(panels),
        title_fontsize=9,
    )
    legend.get_title().set_color(_GREY)
    for text in legend.get_texts():
        if text.get_text() == LEARNED:
            text.set_fontweight("bold")


def _crowded(budgets: Sequence[int]) -> bool:
    """Whether horizontal labels would run into each other."""
    if len(budgets) < 2:
        return False
    span = math.log2(budgets[-1] / budgets[0])
    return any(math.log2(b / a) / span < 0.09 for a, b in itertools.pairwise(budgets))
