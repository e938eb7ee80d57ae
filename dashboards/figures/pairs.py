"""How alike KV heads rank tokens: the matrix of all pairs, and the tree of their clusters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from scipy.cluster.hierarchy import dendrogram, leaves_list, linkage
from scipy.spatial.distance import squareform

from dashboards.figures.drawing import COLOUR_BAR, DIVERGING, GREY, Figure, new_drawing
from dashboards.grouping import grouped
from dashboards.rendering.formats import NOTHING, is_number, number
from dashboards.rendering.table import Table, table

_MOST_WITH_TREE = 256  # a tree or names of more heads are not readable
_MOST_TICKS = 45


@dataclass(frozen=True, kw_only=True, eq=False)
class Correlations:
    """Rank correlations of all pairs of heads.

    Attributes:
        names: of the heads.
        matrix: heads by heads, 1 on the diagonal; NaN where a head has no order.
        num_samples: that each is a mean over.
    """

    names: tuple[str, ...]
    matrix: NDArray[np.float64]
    num_samples: int

    @classmethod
    def of_rows(cls, pairs: Sequence[Mapping[str, Any]], heads: Mapping[int, str]) -> "Correlations":
        """From rows of the table `head_pairs`, means over policy sets where there are several, and names of heads."""
        size = 1 + max(row["head_b"] for row in pairs)
        matrix = np.diag(np.full(size, 1.0)) + np.where(np.eye(size), 0.0, np.nan)
        for pair, rows in grouped(pairs, itemgetter("head_a", "head_b")).items():
            known = [row["spearman"] for row in rows if is_number(row["spearman"])]
            matrix[pair] = matrix[pair[::-1]] = sum(known) / len(known) if known else np.nan
        names = tuple(heads.get(head, f"head {head}") for head in range(size))
        return cls(names=names, matrix=matrix, num_samples=pairs[0]["n"])

    def tree(self) -> NDArray[np.float64]:
        """Average linkage over 1 minus the correlation; a pair without one counts as uncorrelated."""
        distance = 1.0 - np.nan_to_num(self.matrix, nan=0.0)
        np.fill_diagonal(distance, 0.0)
        condensed = squareform(distance.clip(min=0.0), checks=False)
        # Turning branches so that neighbours are as alike as can be takes the cube of the number of heads.
        tree: NDArray[np.float64] = linkage(
            condensed, method="average", optimal_ordering=len(self.names) <= _MOST_WITH_TREE
        )
        return tree


def draw_matrix(correlations: Correlations, tree: NDArray[np.float64] | None = None) -> Figure:
    """The matrix by layer, or as a tree clusters the heads; of few enough heads the tree stands above it."""
    size = len(correlations.names)
    order = list(range(size)) if tree is None else leaves_list(tree).tolist()
    has_tree = tree is not None and size <= _MOST_WITH_TREE
    names = [correlations.names[head] for head in order]
    values = correlations.matrix[np.ix_(order, order)]
    step = -(-size // _MOST_TICKS)
    ticks: dict[str, Any] = {
        "tickvals": list(range(0, size, step)),
        "ticktext": names[::step],
        "tickfont": {"size": 10},
        "showgrid": False,
        "zeroline": False,
    }
    drawing = new_drawing(
        xaxis={**ticks, "tickangle": -90, "range": [-0.5, size - 0.5], "constrain": "domain"},
        yaxis={**ticks, "range": [size - 0.5, -0.5], "domain": [0, 0.86 if has_tree else 1]},
        plot_bgcolor="#fff",
        showlegend=False,
    )
    drawing.add_heatmap(
        z=[[None if np.isnan(value) else round(float(value), 3) for value in row] for row in values],
        text=[[f"{one} and {other}: " for other in names] for one in names] if size <= _MOST_WITH_TREE else None,
        hovertemplate="%{text}%{z:.3f}<extra></extra>" if size <= _MOST_WITH_TREE else "%{z:.3f}<extra></extra>",
        colorscale=DIVERGING,
        reversescale=True,
        zmin=-1,
        zmax=1,
        colorbar=COLOUR_BAR | {"len": 0.86 if has_tree else 1, "y": 0, "yanchor": "bottom"},
    )
    if tree is not None and has_tree:
        _add_tree(drawing, dendrogram(tree, no_plot=True))
    off = correlations.matrix[~np.eye(size, dtype=bool)]
    words = f"from {number(float(np.nanmin(off)))} to {number(float(np.nanmax(off)))}"
    return Figure(
        name="similarity",
        title="How alike heads rank tokens",
        drawing=drawing,
        label=f"Matrix of rank correlations between {size} heads, {words}"
        + (", with the tree of its clusters above it." if has_tree else "."),
        height=720 if size > 12 else 520,
        note=f"{size} heads, pairs {words}, mean over {correlations.num_samples} held-out samples. "
        + ("The tree joins heads by average linkage; its height is 1 minus the correlation." if has_tree else ""),
    )


def _add_tree(drawing: go.Figure, shape: Mapping[str, Any]) -> None:
    """The tree over the matrix; scipy puts leaf number i at 10 i + 5."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for across, up in zip(shape["icoord"], shape["dcoord"], strict=True):
        xs += [(x - 5) / 10 for x in across] + [None]
        ys += [*map(float, up), None]
    line = {"color": GREY, "width": 1}
    drawing.add_scatter(x=xs, y=ys, yaxis="y2", mode="lines", line=line, hoverinfo="skip", name="tree")
    top = max(max(up) for up in shape["dcoord"])
    drawing.update_layout(
        yaxis2={
            "domain": [0.87, 1],
            "anchor": "x",
            "range": [0, 1.05 * top or 1],
            "showgrid": False,
            "zeroline": False,
            "tickvals": [0.5, 1.0],  # not 0, which stands where the first head is named
            "tickfont": {"size": 10},
        }
    )


def means_table(correlations: Correlations) -> Table:
    """Mean correlation of heads of one layer, and of different layers."""
    layers = np.array([name.partition(".")[0] for name in correlations.names])
    ones, others = np.triu_indices(len(layers), k=1)
    values, alike = correlations.matrix[ones, others], layers[ones] == layers[others]
    rows = []
    for words, group in (("of one layer", values[alike]), ("of different layers", values[~alike])):
        known = group[~np.isnan(group)].tolist()
        rows.append([words, number(fmean(known)) if known else NOTHING, str(len(known))])
    return table("Mean over pairs of heads", ["heads", "mean", "pairs"], rows)
