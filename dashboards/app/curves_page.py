"""Page: budget curves of one evaluation, and differences between methods and the best heuristic."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dashboards.app.choosing import FindServices, choose_evaluation, choose_place, lineage_link, mlflow_link, origin
from dashboards.app.content import Nothing, Page
from dashboards.app.difference_panels import Difference, draw_differences, read_differences
from dashboards.app.records import Evaluation, Records, Row
from dashboards.app.selection import Selection
from dashboards.figures.curves import draw_panel, points_table
from dashboards.figures.drawing import Figure
from dashboards.figures.series import Panel, band_note, direction, make_panels, split_full, task_label
from dashboards.figures.styles import heuristics, in_order, method_order, metric_label, metric_order, short_metric
from dashboards.rendering.table import Cell, Table, table
from kvpolicy.names import MEAN_TASK

_SCALES = [("log", "logarithmic"), ("linear", "linear")]


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    evaluation: Evaluation
    rows: list[Row]
    panel: Panel
    differences: dict[str, list[Difference]]
    log_budget: bool


def curves_page(records: Records, find_services: FindServices, selection: Selection) -> Page:
    """The page.

    Args:
        records: of the home.
        find_services: gives MLflow's address where it runs.
        selection: its choices.

    Raises:
        Nothing: there is no evaluation, or it has no curves.
    """
    chosen = _choose(records, selection)
    kept, full_note = split_full(chosen.panel)
    figures = [_curves_figure(chosen, kept, full_note, csv_url=selection.url("curves.csv"))]
    shown = {line.method for line in kept.series}
    differences = {method: entries for method, entries in chosen.differences.items() if method in shown}
    if differences:
        figures.append(_differences_figure(chosen, kept, differences, csv_url=selection.url("curves.csv")))
    return Page(
        template="figures.html",
        content={
            "title": "Budget curves",
            "lead": f"{metric_label(kept.metric)}, against what each KV head keeps.",
            "figures": figures,
            "tables": [points_table(chosen.panel, folded=True), _origins(chosen.rows, find_services())],
            "origin": origin(chosen.evaluation),
        },
    )


def _curves_figure(chosen: _Chosen, kept: Panel, full_note: str, *, csv_url: str) -> Figure:
    title = f"{short_metric(kept.metric)}: {kept.label}"
    return Figure(
        name="curves",
        title=title,
        drawing=draw_panel(kept, log_budget=chosen.log_budget),
        label=f"Line chart. {title}, {len(kept.series)} methods over {len(kept.budgets)} budgets. "
        "All values are in the table below.",
        height=520,
        note="; ".join(filter(None, [direction(kept.metric), full_note, band_note([chosen.panel])])),
        csv_url=csv_url,
    )


def _differences_figure(
    chosen: _Chosen, kept: Panel, differences: Mapping[str, Sequence[Difference]], *, csv_url: str
) -> Figure:
    better = "below 0 is better" if direction(kept.metric).startswith("lower") else "above 0 is better"
    intervals = [
        (entry.low, entry.high) for entries in differences.values() for entry in entries if entry.low is not None
    ]
    if any(low != high for low, high in intervals):
        bands = "bands: intervals of paired differences, over samples and seeds"
    elif intervals:
        bands = "no bands: all intervals have no width, as those of one sample a task"
    else:
        bands = "differences of means, without intervals, since the samples' scores are not in the catalog"
    return Figure(
        name="differences",
        title=f"Difference to the best heuristic: {kept.label}",
        drawing=draw_differences(differences, kept, log_budget=chosen.log_budget),
        label=f"Line chart of the difference to the best heuristic at each budget, {len(differences)} methods.",
        note=f"{better}; {bands}",
        csv_url=csv_url,
    )


def curves_file(records: Records, selection: Selection) -> str:
    """The numbers of the page as the text of a CSV file."""
    import pandas as pd

    chosen = _choose(records, selection)
    differences = {(method, entry.budget): entry for method, entries in chosen.differences.items() for entry in entries}
    panel, rows = chosen.panel, []
    for line in panel.series:
        for point in line.points:
            entry = differences.get((line.method, point.budget))
            ends = (point.low, point.high) if point.has_interval else ("", "")
            against = ("", "", "", "") if entry is None else (entry.baseline, entry.value, entry.low, entry.high)
            place = (panel.benchmark, panel.setting, panel.task, panel.metric)
            rows.append(
                [*place, line.method, point.budget, point.value, *ends, point.num_samples, point.num_seeds, *against]
            )
    columns = (
        "benchmark", "setting", "task", "metric", "method", "budget", "value", "ci_low", "ci_high", "n", "num_seeds",
        "best_heuristic", "difference", "difference_low", "difference_high",
    )  # fmt: skip
    text: str = pd.DataFrame(rows, columns=columns).to_csv(index=False)
    return text


def _choose(records: Records, selection: Selection) -> _Chosen:
    evaluation = choose_evaluation(records, selection)
    rows = records.curves(evaluation)
    if not rows:
        raise Nothing("The curves of this evaluation are not in the catalog.", "kvp evaluate")
    rows = choose_place(selection, rows)
    metrics = sorted({row["metric"] for row in rows}, key=metric_order)
    metric = selection.one("metric", "Metric", [(name, metric_label(name)) for name in metrics])
    rows = [row for row in rows if row["metric"] == metric]
    tasks = sorted({row["task"] for row in rows}, key=lambda task: (task != MEAN_TASK, task))
    task = selection.one("task", "Task", [(name, task_label(name)) for name in tasks])
    rows = [row for row in rows if row["task"] == task]
    scale = selection.one("scale", "Budget axis", _SCALES)
    methods = selection.several("method", "Methods", in_order(row["method"] for row in rows))
    wanted = selection.several("seed", "Seeds", map(str, sorted({row["seed"] for row in rows})))
    # A method of a single seed does not depend on it, so that there is no choice.
    num_seeds = Counter(method for method, _ in {(row["method"], row["seed"]) for row in rows})
    of_seeds = [row for row in rows if str(row["seed"]) in wanted or num_seeds[row["method"]] == 1]
    drawn = [row for row in of_seeds if row["method"] in methods]
    if not drawn:
        raise Nothing(f"None of the chosen methods has seed {', '.join(wanted)}.", "")
    (panel,), (whole,) = make_panels(drawn), make_panels(of_seeds)
    if task == MEAN_TASK and len(of_seeds) == len(rows):
        comparisons = records.comparisons(evaluation)
    else:
        comparisons = records.compared(evaluation, of_seeds)
    return _Chosen(
        evaluation=evaluation,
        rows=drawn,
        panel=panel,
        differences=read_differences(whole, comparisons, heuristics(rows)),
        log_budget=scale == "log",
    )


def _origins(rows: list[Row], services: Mapping[str, str]) -> Table:
    """Each curve with links to its lineage and its run in MLflow."""
    firsts = {(row["method"], row["seed"]): row for row in reversed(rows)}
    lines: list[list[Cell]] = [
        [
            method,
            str(seed),
            lineage_link(firsts[method, seed]["curve_id"]),
            lineage_link(trained) if (trained := firsts[method, seed]["policy_set_id"]) else "",
            mlflow_link(services, firsts[method, seed]["mlflow_run_id"]) or "",
        ]
        for method, seed in sorted(firsts, key=lambda curve: (method_order(curve[0]), curve[1]))
    ]
    columns = ["method", "seed", "curve", "made from", "MLflow"]
    shown = len(columns) - ("mlflow" not in services)
    return table("Where each curve is from", columns[:shown], [line[:shown] for line in lines], folded=True, numeric=())
