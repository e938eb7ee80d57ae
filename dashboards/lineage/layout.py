"""Layout of the groups of a lineage graph: layers from left to right, with lanes for flows that pass by.

The usual steps of a layered drawing (Sugiyama, Tagawa and Toda 1981): layers by the longest way, order by the mean
place of the neighbours, heights as near to the neighbours as the order allows. A flow over several layers runs in a
lane; all flows of one group share its lane, so that a model that every run reads is one line with branches.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.optimize import isotonic_regression

_SWEEPS = 12
_LANE = 0.4  # height of a lane, in heights of a node

Item = tuple[int, int]  # (group, layer): the group itself in its own layer, its lane in a later one


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Places of groups and ways of flows.

    Attributes:
        layers: layer of each group, from 0 at the left.
        heights: place of each group's centre, from 0 at the top, in heights of a node.
        ways: for each flow, (layer, height) of each place that it runs through, from its source to its target.
    """

    layers: tuple[int, ...]
    heights: tuple[float, ...]
    ways: tuple[tuple[tuple[int, float], ...], ...]


def lay_out(num_groups: int, flows: Sequence[tuple[int, int]]) -> Layout:
    """Place groups; flows lead from left to right, but for one in each cycle."""
    layers = _layers(num_groups, flows)
    ways = [_way(layers, source, target) for source, target in flows]
    neighbours: dict[Item, dict[Item, None]] = {(group, layer): {} for group, layer in enumerate(layers)}
    for way in ways:
        for item, following in itertools.pairwise(way):
            neighbours.setdefault(item, {})[following] = None
            neighbours.setdefault(following, {})[item] = None
    columns: list[list[Item]] = [[] for _ in range(max(layers) + 1)]
    for item in neighbours:
        columns[item[1]].append(item)
    sizes = {item: 1.0 if layers[item[0]] == item[1] else _LANE for item in neighbours}
    heights = _heights(columns, neighbours, sizes)
    return Layout(
        layers=tuple(layers),
        heights=tuple(heights[group, layer] for group, layer in enumerate(layers)),
        ways=tuple(tuple((layer, heights[group, layer]) for group, layer in way) for way in ways),
    )


def _way(layers: Sequence[int], source: int, target: int) -> list[Item]:
    passed = range(layers[source] + 1, layers[target])
    return [(source, layers[source]), *((source, layer) for layer in passed), (target, layers[target])]


def _layers(size: int, flows: Sequence[tuple[int, int]]) -> list[int]:
    """The longest way from a source; a source stands just before its first target."""
    before: list[list[int]] = [[] for _ in range(size)]
    after: list[list[int]] = [[] for _ in range(size)]
    for source, target in flows:
        before[target].append(source)
        after[source].append(target)
    waiting = [len(sources) for sources in before]
    ready = [group for group in range(size) if not before[group]]
    layers = [0] * size
    while ready:
        group = ready.pop()
        for target in after[group]:
            layers[target] = max(layers[target], layers[group] + 1)
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    for group in range(size):
        if not before[group] and after[group]:
            layers[group] = max(0, min(layers[target] for target in after[group]) - 1)
    return layers


def _heights(
    columns: Sequence[list[Item]], neighbours: Mapping[Item, Iterable[Item]], sizes: Mapping[Item, float]
) -> dict[Item, float]:
    heights = {item: float(index) for column in columns for index, item in enumerate(column)}
    for sweep in range(2 * _SWEEPS):
        for column in columns if sweep % 2 == 0 else columns[::-1]:
            wanted = {item: fmean([heights[other] for other in neighbours[item]] or [heights[item]]) for item in column}
            if sweep < _SWEEPS:  # first the order, then, with the order as it is, the heights
                column.sort(key=wanted.__getitem__)
            heights |= _spread(column, wanted, sizes)
    top = min(height - sizes[item] / 2 for item, height in heights.items())
    return {item: height - top for item, height in heights.items()}


def _spread(column: Sequence[Item], wanted: Mapping[Item, float], sizes: Mapping[Item, float]) -> dict[Item, float]:
    """The heights nearest to the wanted ones (least squares) at which nothing overlaps and the order holds."""
    steps = [(sizes[upper] + sizes[lower]) / 2 for upper, lower in itertools.pairwise(column)]
    offsets = np.cumsum([0.0, *steps])
    moved = isotonic_regression([wanted[item] for item in column] - offsets).x + offsets
    return dict(zip(column, moved.tolist(), strict=True))
