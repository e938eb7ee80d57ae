"""Rows of the catalog's `curves` table, sorted into the panels of plots and tables.

A *panel* is everything that may share one pair of axes: one benchmark, setting, metric and task. Settings are never
mixed, because every panel has exactly one. Nothing is drawn here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

from dashboards.figures.styles import in_order, metric_label, metric_order, place_label
from dashboards.grouping import Row, grouped
from kvpolicy.names import MEAN_TASK, SETTINGS
from kvpolicy.results.metrics import LOWER_IS_BETTER

_FIELDS = ("method", "benchmark", "task", "setting", "metric", "budget", "value", "ci_low", "ci_high", "n", "seed")
_PANEL_FIELDS = ("benchmark", "setting", "metric", "task")
_PANEL = itemgetter(*_PANEL_FIELDS)
_MAX_DECADES = 6


@dataclass(frozen=True, kw_only=True)
class Point:
    """One method at one budget: the mean over its seeds, and the hull of the seeds' intervals.

    Without intervals both ends are the value.
    """

    budget: int
    value: float
    low: float
    high: float
    num_samples: int
    num_seeds: int
    has_interval: bool


@dataclass(frozen=True, kw_only=True)
class Series:
    """One method's line, by ascending budget."""

    method: str
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The lines that share one pair of axes, the learned policy first."""

    benchmark: str
    setting: str
    metric: str
    task: str
    series: tuple[Series, ...]

    @property
    def label(self) -> str:
        """Benchmark, setting and task in a few words."""
        return f"{place_label(self.benchmark, self.setting)}, {task_label(self.task)}"

    @cached_property
    def points(self) -> dict[tuple[str, int], Point]:
        """Every point by method and budget."""
        return {(line.method, point.budget): point for line in self.series for point in line.points}

    @property
    def budgets(self) -> list[int]:
        """Every budget at which some method has a value."""
        return sorted({point.budget for line in self.series for point in line.points})

    @property
    def is_log(self) -> bool:
        """Whether the values belong on a logarithmic axis."""
        return self.metric in LOWER_IS_BETTER


def task_label(task: str) -> str:
    """A task in words."""
    return "mean over tasks" if task == MEAN_TASK else task


def make_panels(rows: Sequence[Row]) -> list[Panel]:
    """Sorts the rows into panels.

    Raises:
        ValueError: there are no rows; a row lacks a field or has a value that can't be drawn; a point occurs twice
            (rows of two evaluations or models, say).
    """
    if not rows:
        raise ValueError("no curve points to draw: expected rows of the catalog's curves table, got none")
    for index, row in enumerate(rows):
        _check(row, index)
    panels = grouped(rows, _PANEL)
    return [
        Panel(**dict(zip(_PANEL_FIELDS, key, strict=True)), series=tuple(_make_series(panels[key])))
        for key in sorted(panels, key=lambda key: _panel_order(*key))
    ]


def _make_series(rows: Sequence[Row]) -> Iterator[Series]:
    methods = grouped(rows, itemgetter("method"))
    for method in in_order(methods):
        budgets = grouped(methods[method], lambda row: int(row["budget"]))
        yield Series(method=method, points=tuple(_over_seeds(budget, budgets[budget]) for budget in sorted(budgets)))


@dataclass(frozen=True, kw_only=True)
class ValueAxis:
    """How a panel's values meet its axis.

    Attributes:
        floor: where values are drawn that a logarithmic axis can't show in place, or None where all can be: those of 0
            and those more than six decades under the largest. The floor is a power of ten under every other value, and
            the axis has to say what lies on it.
        bottom: where bands end. An interval may reach 0, which a logarithmic axis never does.
    """

    floor: float | None
    bottom: float


def value_axis(panel: Panel) -> ValueAxis:
    """The axis of a panel's values."""
    points = [point for line in panel.series for point in line.points]
    if not panel.is_log:
        return ValueAxis(floor=None, bottom=-math.inf)
    lowest = max(point.value for point in points) * 10.0**-_MAX_DECADES
    shown = [point for point in points if point.value > lowest]
    if not shown:
        return ValueAxis(floor=10.0**-_MAX_DECADES, bottom=10.0**-_MAX_DECADES)
    smallest = min(point.value for point in shown)
    if len(shown) < len(points):
        floor = 10.0 ** math.floor(math.log10(smallest / 2))
        return ValueAxis(floor=floor, bottom=floor)
    return ValueAxis(floor=None, bottom=max(smallest / 3, min(point.low for point in shown)))


def split_full(panel: Panel) -> tuple[Panel, str]:
    """A KL panel without the full cache, from which KL is measured, and a note on that.

    The note gives the largest value that is left out. Other panels, and one of the full cache alone, stay as they are.
    """
    others = tuple(line for line in panel.series if line.method != "full")
    if not panel.is_log or not others or len(others) == len(panel.series):
        return panel, ""
    largest = max(point.value for line in panel.series if line.method == "full" for point in line.points)
    return replace(panel, series=others), f"full: {'0' if largest == 0 else f'at most {largest:.0e}'}, not drawn"


def value_label(metric: str, floor: float | None, line_break: str) -> str:
    """The title of the value axis, with a remark on values that a logarithmic axis can't show in place."""
    lines = metric_label(metric).split(", ", 1)
    if floor is not None:
        lines.append(f"(values under {floor:.0e}, also 0, drawn at {floor:.0e})")
    return line_break.join(lines)


def direction(metric: str) -> str:
    """Whether lower or higher values are better."""
    return "lower is better" if metric in LOWER_IS_BETTER else "higher is better"


def band_note(panels: Sequence[Panel]) -> str:
    """The meaning of the bands and the lines."""
    seeds: dict[str, int] = {}
    for panel in panels:
        for line in panel.series:
            seeds[line.method] = max(seeds.get(line.method, 1), *(point.num_seeds for point in line.points))
    points = [point for panel in panels for line in panel.series for point in line.points]
    counts = [point.num_samples for point in points if point.low < point.high]
    if not counts:
        return "no intervals: one sample a task says nothing about spread"
    count = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"
    note = f"bands: bootstrap intervals over {count} samples"
    if any(all(p.low == p.high for line in panel.series for p in line.points) for panel in panels):
        note += "; none where a task has only one"
    several = [f"{method} ({count})" for method, count in seeds.items() if count > 1]
    return f"{note}; several seeds: mean, and all their intervals together: {', '.join(several)}" if several else note


def _panel_order(benchmark: str, setting: str, metric: str, task: str) -> tuple[Any, ...]:
    settings = list(SETTINGS)
    place = settings.index(setting) if setting in settings else len(settings)
    return (benchmark, place, setting, metric_order(metric), task != MEAN_TASK, task)


def _over_seeds(budget: int, rows: Sequence[Row]) -> Point:
    for seed, (row, *again) in grouped(rows, itemgetter("seed")).items():
        if again:
            raise ValueError(
                f"curve point given twice: {row['method']}, {'/'.join(_PANEL(row))}, budget {budget}, seed {seed}; "
                "give the rows of one evaluation"
            )
    return Point(
        budget=budget,
        value=math.fsum(row["value"] for row in rows) / len(rows),
        low=min(_end(row, "ci_low") for row in rows),
        high=max(_end(row, "ci_high") for row in rows),
        num_samples=max(int(row["n"]) for row in rows),
        num_seeds=len(rows),
        has_interval=any(row["ci_low"] is not None and not math.isnan(row["ci_low"]) for row in rows),
    )


def _end(row: Row, field: str) -> float:
    """An end of the interval; the value itself where there is none."""
    end = row[field]
    return float(row["value"] if end is None or math.isnan(end) else end)


def _check(row: Row, index: int) -> None:
    if missing := [field for field in _FIELDS if field not in row]:
        raise ValueError(f"curve row {index}: lacks {', '.join(missing)}; expected the fields {', '.join(_FIELDS)}")
    if not math.isfinite(row["value"]):
        raise ValueError(
            f"curve row {index} ({row['method']}, {row['metric']}): expected a finite value, got {row['value']}"
        )
    if row["metric"] in LOWER_IS_BETTER and row["value"] < 0:
        raise ValueError(f"curve row {index} ({row['method']}): expected {row['metric']} >= 0, got {row['value']}")
    if row["budget"] < 1:
        raise ValueError(
            f"curve row {index} ({row['method']}): expected a budget of at least 1 token, got {row['budget']}"
        )
