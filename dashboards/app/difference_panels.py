"""How far methods are from the best heuristic, budget by budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from dashboards.figures.curves import band, budget_axis, line
from dashboards.figures.drawing import new_drawing
from dashboards.figures.series import Panel
from dashboards.rendering.formats import interval
from kvpolicy.names import BOUNDS
from kvpolicy.results.metrics import LOWER_IS_BETTER


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A method against the best heuristic at one budget: method minus heuristic.

    Attributes:
        budget: in tokens.
        baseline: the heuristic.
        value: the difference.
        low: lower end of its paired interval; None where none is known.
        high: upper end.
    """

    budget: int
    baseline: str
    value: float
    low: float | None = None
    high: float | None = None


def read_differences(
    panel: Panel, comparisons: Iterable[Mapping[str, Any]], heuristics: Sequence[str]
) -> dict[str, list[Difference]]:
    """Differences of every method of a panel, by ascending budget.

    Where there are no paired comparisons, the differences of the two means are given, without intervals.

    Args:
        panel: the curves.
        comparisons: rows of the table `comparisons`, or like them, that are of the panel's task and seeds.
        heuristics: methods that are made from nothing that was trained.
    """
    wanted = (panel.benchmark, panel.setting, panel.metric)
    rows = [
        row
        for row in comparisons
        if row["is_best_baseline"] and (row["benchmark"], row["setting"], row["metric"]) == wanted
    ]
    return _paired(rows, [line.method for line in panel.series]) if rows else _of_means(panel, heuristics)


def _paired(rows: Sequence[Mapping[str, Any]], shown: Sequence[str]) -> dict[str, list[Difference]]:
    best = {row["budget"]: row["other"] for row in rows}
    by_method: dict[str, list[Difference]] = {}
    for row in sorted(rows, key=lambda row: row["budget"]):
        entry = Difference(
            budget=row["budget"],
            baseline=row["other"],
            value=row["difference"],
            low=row["ci_low"],
            high=row["ci_high"],
        )
        by_method.setdefault(row["method"], []).append(entry)
    for budget, method in best.items():  # no method is compared with itself
        by_method.setdefault(method, []).append(
            Difference(budget=budget, baseline=method, value=0.0, low=0.0, high=0.0)
        )
    return {m: sorted(by_method[m], key=lambda entry: entry.budget) for m in shown if m in by_method}


def _of_means(panel: Panel, heuristics: Sequence[str]) -> dict[str, list[Difference]]:
    values = {key: point.value for key, point in panel.points.items()}
    pick = min if panel.metric in LOWER_IS_BETTER else max
    best: dict[int, str] = {}
    for budget in panel.budgets:
        there = {name: values[name, budget] for name in heuristics if (name, budget) in values and name not in BOUNDS}
        if there:
            best[budget] = pick(there, key=there.__getitem__)
    return {
        line.method: [
            Difference(
                budget=point.budget,
                baseline=best[point.budget],
                value=point.value - values[best[point.budget], point.budget],
            )
            for point in line.points
            if point.budget in best
        ]
        for line in panel.series
        if best
    }


def draw_differences(differences: Mapping[str, Sequence[Difference]], panel: Panel, *, log_budget: bool) -> go.Figure:
    """One line a method with its band; two traces where there are intervals, one where there are none."""
    figure = new_drawing(
        uirevision="methods",
        xaxis=budget_axis(panel.budgets, log_budget=log_budget),
        yaxis={"title": {"text": "difference to the best heuristic"}, "zeroline": True, "zerolinecolor": "#444"},
    )
    for method, entries in reversed(list(differences.items())):
        budgets = [entry.budget for entry in entries]
        ends = [(entry.low, entry.high) for entry in entries if entry.low is not None and entry.high is not None]
        if len(ends) == len(entries):
            figure.add_trace(band(method, budgets, *zip(*ends, strict=True), uid=f"band-{method}"))
        figure.add_trace(
            line(
                method,
                budgets,
                [entry.value for entry in entries],
                uid=f"line-{method}",
                customdata=[[entry.baseline, _interval(entry)] for entry in entries],
                hovertemplate="budget %{x}: %{y:.3g}%{customdata[1]}<br>against %{customdata[0]}",
            )
        )
    return figure


def _interval(entry: Difference) -> str:
    return "" if entry.low is None else f" {interval(entry.low, entry.high)}"
