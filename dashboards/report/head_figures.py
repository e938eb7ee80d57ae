"""Figures of heads: layers by KV heads as heat maps, costs as boxes, and how alike heads rank."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from dashboards.formats import number
from dashboards.report.document import Picture
from dashboards.report.drawing import (
    DIVERGING,
    GREY,
    SEQUENTIAL,
    colour_bar,
    heat_map,
    log_axis,
    new_figure,
    plain_axes,
    to_png,
)
from dashboards.report.head_rows import Head
from dashboards.report.view import Place, short
from dashboards.styles import style_of
from dashboards.tables import Table, table

_WIDTH_INCHES = 9.5


def shape_maps(heads: Sequence[Head], shapes: Mapping[str, str], numbers: Table) -> Picture:
    """One map a figure of shape, layers from left to right."""
    values = {words: [head.shape[shape] for head in heads] for shape, words in shapes.items()}
    known = {words: [value for value in of_words if value is not None] for words, of_words in values.items()}
    ranges = "; ".join(
        f"{words} from {number(min(of_words))} to {number(max(of_words))}" for words, of_words in known.items()
    )
    return Picture(
        png=to_png(
            draw_maps(
                heads,
                {words: (np.array(of_words, dtype=float), _scale(of_words)) for words, of_words in values.items()},
            )
        ),
        title="Shape of the oracle's importance, head by head",
        caption="A steep Zipf slope means that few tokens matter, so that eviction costs little; many effective tokens "
        "mean the opposite. A large rank deviation: the head ranks unlike the others. Layers from left to right, KV "
        "heads of a layer from top to bottom. Grey: no value.",
        alt=f"Heat maps over layers and KV heads: {ranges}. The values are in the table below.",
        tables=(numbers,),
    )


def cost_maps(place: Place, heads: Sequence[Head], costs: Mapping[str, np.ndarray]) -> Picture:
    """The learned policy's cost of each head and the best other method's, in the same colours."""
    everything = np.concatenate(list(costs.values()))
    norm = LogNorm(max(1e-3, float(np.nanmin(everything))), max(1.001, float(np.nanmax(everything))))
    names = " and ".join(costs)
    rows = [
        (head.name, *(number(float(values[index])) for values in costs.values())) for index, head in enumerate(heads)
    ]
    numbers = table(f"Cost of every head: {short(place)}", ("head", *costs), rows)
    return Picture(
        png=to_png(draw_maps(heads, {f"{method}: cost": (values, norm) for method, values in costs.items()})),
        title=f"Cost of each head under {names}: {short(place)}",
        caption="The same logarithmic colours in each map; 1 is optimal. The second method is the baseline with the "
        "lowest mean cost.",
        alt="Heat maps of eviction cost over layers and KV heads: "
        + "; ".join(f"{name} from {number(np.nanmin(v))} to {number(np.nanmax(v))}" for name, v in costs.items())
        + ". The values are in the table below.",
        tables=(numbers,),
    )


def cost_boxes(place: Place, costs: Mapping[str, np.ndarray], numbers: Table) -> Picture:
    """One box a method, over heads."""
    methods = list(costs)
    figure = new_figure(_WIDTH_INCHES, 0.34 * len(methods) + 1.0)
    ax = figure.subplots()
    for y, method in enumerate(reversed(methods)):
        values = costs[method][~np.isnan(costs[method])]
        colour = style_of(method).colour
        low, lower, middle, upper, high = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95))
        ax.plot([low, high], [y, y], color=colour, linewidth=1.4)
        ax.barh(y, upper - lower, left=lower, height=0.55, color=colour, alpha=0.35, edgecolor=colour)
        ax.plot([middle, middle], [y - 0.27, y + 0.27], color=colour, linewidth=2.2)
        outside = values[(values < low) | (values > high)]
        ax.plot(outside, np.full(len(outside), y), ".", color=colour, markersize=4)
    log_axis(ax.xaxis)
    ax.set_yticks(range(len(methods)), list(reversed(methods)))
    ax.set_xlabel("normalised eviction cost of a head (1 is optimal)", fontsize=9, color=GREY)
    plain_axes(ax)
    medians = ", ".join(f"{method} {number(float(np.nanmedian(values)))}" for method, values in costs.items())
    return Picture(
        png=to_png(figure),
        title=f"Cost of heads by method: {short(place)}",
        caption="Box: middle half of the heads, with the median; line: 5 % to 95 %; dots: the heads outside.",
        alt=f"Box plots of eviction cost over heads. Medians: {medians}. Quartiles are in the table below.",
        tables=(numbers,),
    )


def pair_map(heads: Sequence[Head], means: Mapping[tuple[int, int], float], tables: tuple[Table, ...]) -> Picture:
    """Heads by heads, in the order of layers."""
    place = {head.head: index for index, head in enumerate(heads)}
    matrix = np.full((len(heads), len(heads)), np.nan)
    for (first, second), value in means.items():
        matrix[place[first], place[second]] = matrix[place[second], place[first]] = value
    figure = new_figure(6.6, 5.6)
    ax = figure.subplots()
    names = [head.name for head in heads]
    image = heat_map(ax, matrix, colours=DIVERGING, norm=Normalize(-1, 1), rows=names, columns=names)
    ax.tick_params(axis="x", rotation=90)
    colour_bar(figure, image, [ax], "rank correlation of importance")
    return Picture(
        png=to_png(figure),
        title="How alike heads rank",
        caption="Spearman's rank correlation of two heads' importance, mean over held-out samples. 1: they rank all "
        "tokens alike, so one policy would do for both.",
        alt=f"Matrix of rank correlations between {len(heads)} heads, from {number(min(means.values()))} to "
        f"{number(max(means.values()))}. Means and extremes are in the tables below.",
        tables=tables,
    )


def draw_maps(heads: Sequence[Head], values: Mapping[str, tuple[np.ndarray, Normalize]]) -> Figure:
    """One map for each of some figures, layers from left to right and KV heads from top to bottom."""
    layers, rows = max(head.layer for head in heads) + 1, max(head.kv_head for head in heads) + 1
    figure = new_figure(_WIDTH_INCHES, len(values) * (0.85 + 0.17 * rows) + 0.2)
    for ax, (words, (map_values, norm)) in zip(
        figure.subplots(len(values), 1, squeeze=False).flat, values.items(), strict=True
    ):
        grid = np.full((rows, layers), np.nan)
        for head, value in zip(heads, map_values, strict=True):
            grid[head.kv_head, head.layer] = value
        image = heat_map(
            ax,
            grid,
            colours=SEQUENTIAL,
            norm=norm,
            rows=[f"H{row}" for row in range(rows)],
            columns=[f"{layer}" for layer in range(layers)],
        )
        ax.set_title(f"{words}, by layer", fontsize=9.5, loc="left", color=GREY)
        colour_bar(figure, image, [ax], "")
    return figure


def _scale(values: Sequence[float | None]) -> Normalize:
    known = [value for value in values if value is not None]
    margin = 0.0 if max(known) > min(known) else 0.05 * abs(min(known)) + 1e-6
    return Normalize(min(known) - margin, max(known) + margin)
