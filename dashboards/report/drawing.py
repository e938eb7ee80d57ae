"""Drawing for a report: figures as small PNG files, and heat maps that read the same everywhere."""

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

GREY = "#444444"
SEQUENTIAL, DIVERGING = "cividis", "PuOr_r"
"""Colour maps that stay readable under the common colour-vision deficiencies."""
_DPI = 130
_COLOURS = 255
_STEPS, _FEW_STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0)
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """A figure of its own, outside matplotlib's global state."""
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def to_png(figure: Figure) -> bytes:
    """The figure with a palette of 255 colours, a third of the size, and the same bytes for the same figure."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    picture = Image.open(drawn).convert("RGB")
    picture.quantize(_COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        small, format="png", optimize=True
    )
    return small.getvalue()


def heat_map(
    ax: Axes,
    values: np.ndarray,
    *,
    colours: str | Colormap,
    norm: Normalize,
    rows: Sequence[str],
    columns: Sequence[str],
) -> AxesImage:
    """Draw a matrix, the first row at the top; what has no value is grey.

    Args:
        ax: where to draw.
        values: the matrix; NaN where there is no value.
        colours: colour map.
        norm: scale of the colours.
        rows: names of the rows; as many as are readable are written.
        columns: names of the columns.
    """
    ax.set_facecolor("#BDBDBD")
    image = ax.imshow(np.ma.masked_invalid(values), aspect="auto", cmap=colours, norm=norm, interpolation="nearest")
    for axis, names in ((ax.yaxis, rows), (ax.xaxis, columns)):
        places = range(0, len(names), max(1, -(-len(names) // 24)))
        axis.set_ticks(list(places), [names[place] for place in places])
    ax.tick_params(labelsize=8, colors=GREY, length=2)
    for spine in ax.spines.values():
        spine.set_visible(False)
    return image


def colour_bar(figure: Figure, image: AxesImage, axes: Sequence[Axes], label: str) -> None:
    """The scale of a heat map, beside its axes."""
    ticks = LogLocator(subs=_FEW_STEPS) if isinstance(image.norm, LogNorm) else MaxNLocator(4)
    bar = figure.colorbar(image, ax=list(axes), fraction=0.05, pad=0.02, ticks=ticks, format=_PLAIN)
    bar.ax.minorticks_off()
    bar.set_label(label, fontsize=9, color=GREY)
    bar.ax.tick_params(labelsize=8, colors=GREY)
    bar.outline.set_visible(False)


def log_axis(axis: XAxis | YAxis) -> None:
    """Make an axis logarithmic, with plain numbers as labels, once all is drawn."""
    low, high = axis.get_data_interval()
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=_STEPS if high < 8 * low else _FEW_STEPS))
    axis.set_major_formatter(_PLAIN)
    axis.set_minor_locator(NullLocator())


def plain_axes(ax: Axes) -> None:
    """Light grid, no box: as in every other figure here."""
    ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, colors=GREY)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
