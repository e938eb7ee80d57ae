"""Differences between methods and the best heuristic, budget by budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from dashboards.figures.curves import band, budget_axis, line
from dashboards.figures.drawing import new_drawing
from dashboards.figures.series import Panel
from dashboards.grouping import Row
from dashboards.rendering.formats import interval
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
    low: float | None
    high: float | None


def read_differences(
    panel: Panel, comparisons: Iterable[Row], heuristics: Sequence[str]
) -> dict[str, list[Difference]]:
    """Differences of every method of a panel, by ascending budget.

    Where there are no paired comparisons, the differences of the two means are given, without intervals.

    Args:
        panel: the curves.
        comparisons: rows of the table `comparisons`, or like them, that are of the panel's task and seeds.
        heuristics: methods that are made from nothing that was trained.
    """
    wanted = (panel.benchmark, panel.setting, panel.metric)
    paired: dict[tuple[str, int], Row] = {
        (row["method"], row["budget"]): row
        for row in comparisons
        if row["is_best_baseline"] and (row["benchmark"], row["setting"], row["metric"]) == wanted
    }
    best = {budget: row["other"] for (_, budget), row in paired.items()}
    if paired:  # no method is compared with itself
        paired |= {(best[at], at): {"difference": 0.0, "ci_low": 0.0, "ci_high": 0.0} for at in best}
    else:
        best, paired = _of_means(panel, heuristics)
    differences = {
        line.method: [
            Difference(budget=at, baseline=best[at], value=row["difference"], low=row["ci_low"], high=row["ci_high"])
            for at in panel.budgets
            if (row := paired.get((line.method, at)))
        ]
        for line in panel.series
    }
    return {method: entries for method, entries in differences.items() if entries}


def _of_means(panel: Panel, heuristics: Sequence[str]) -> tuple[dict[int, str], dict[tuple[str, int], Row]]:
    """The best heuristic by budget, and every method's difference to it."""
    values = {key: point.value for key, point in panel.points.items()}
    sign = 1 if panel.metric in LOWER_IS_BETTER else -1
    best = {
        at: min(there, key=lambda name: sign * values[name, at])
        for at in panel.budgets
        if (there := [name for name in heuristics if (name, at) in values])
    }
    return best, {
        (method, at): {"difference": value - values[best[at], at], "ci_low": None, "ci_high": None}
        for (method, at), value in values.items()
        if at in best
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
