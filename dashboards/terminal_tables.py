"""Tables for a terminal: methods by budgets, and the time of each stage."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dashboards.figures.series import Panel, Point, direction, make_panels, task_label
from dashboards.figures.styles import metric_label, setting_label
from dashboards.rendering.formats import NOTHING, duration, short_number
from kvpolicy.names import BOUNDS, LEARNED, MEAN_TASK
from kvpolicy.results.metrics import LOWER_IS_BETTER

BETTER_MARK = "†"


def curve_table(
    rows: Sequence[Mapping[str, Any]],
    *,
    metric: str,
    setting: str,
    benchmark: str | None = None,
    task: str = MEAN_TASK,
    better: Mapping[int, bool] | None = None,
) -> Table:
    """A table of `value [low, high]`, one row a method and one column a budget.

    The best value of each budget is bold, the oracle and the full cache aside. A narrow terminal breaks a cell over
    lines rather than cutting it.

    Args:
        rows: rows of the catalog's `curves` table, of one evaluation.
        metric: which metric.
        setting: which setting; a table never mixes them.
        benchmark: which benchmark; may be left out where the rows have one.
        task: which task; the mean over all of them by default.
        better: the budgets at which the learned policy beats every heuristic by a paired difference whose interval
            excludes 0; they are marked.

    Raises:
        ValueError: no row fits, or rows of several benchmarks do.
    """
    panel = _choose(rows, metric=metric, setting=setting, benchmark=benchmark, task=task)
    points = panel.points
    best = {budget: _best(panel, budget) for budget in panel.budgets}
    marked = {(LEARNED, budget) for budget, is_better in (better or {}).items() if is_better} & points.keys()

    table = Table(
        title=f"{panel.benchmark}, {setting_label(setting)}, {task_label(task)}\n"
        f"{metric_label(metric)}; {direction(metric)}",
        caption=Text(
            "value [interval]; bold: best at that budget, oracle and full aside"
            + (f"\n{BETTER_MARK} better than every heuristic: the paired intervals exclude 0" if marked else "")
        ),
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("method", no_wrap=True)
    for budget in panel.budgets:
        table.add_column(str(budget), justify="right", overflow="fold")
    for line in panel.series:
        cells = []
        for budget in panel.budgets:
            point = points.get((line.method, budget))
            mark = BETTER_MARK if (line.method, budget) in marked else ""
            bold = point is not None and line.method not in BOUNDS and point.value == best[budget]
            cells.append(_cell(point, mark, bold=bold))
        table.add_row(line.method, *cells)
    return table


def stage_table(stages: Mapping[str, Mapping[str, Any]]) -> Table:
    """A table of stages, the time that each took, and which were skipped because nothing had changed.

    Args:
        stages: stage name to `{"seconds": float, "skipped": bool}`, in the order to show.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, show_footer=len(stages) > 1)
    table.add_column("stage", footer="total")
    table.add_column("time", justify="right", footer=duration(sum(stage["seconds"] for stage in stages.values())))
    table.add_column("")
    for name, stage in stages.items():
        table.add_row(name, duration(stage["seconds"]), "skipped: nothing changed" if stage["skipped"] else "")
    return table


def _choose(rows: Sequence[Mapping[str, Any]], *, metric: str, setting: str, benchmark: str | None, task: str) -> Panel:
    panels = make_panels(rows)
    fits = [p for p in panels if (p.metric, p.setting, p.task) == (metric, setting, task)]
    fits = [p for p in fits if benchmark in (None, p.benchmark)]
    if not fits:
        there = sorted({f"{p.benchmark}/{p.setting}/{p.metric}" for p in panels if p.task == task})
        wanted = f"{benchmark or '*'}/{setting}/{metric}"
        raise ValueError(
            f"no curve points of {wanted} for task '{task}'; there are {', '.join(there) or 'none for that task'}"
        )
    if len(fits) > 1:
        raise ValueError(f"curve points of several benchmarks ({', '.join(p.benchmark for p in fits)}): name one")
    return fits[0]


def _best(panel: Panel, budget: int) -> float | None:
    values = [point.value for (method, at), point in panel.points.items() if at == budget and method not in BOUNDS]
    pick = min if panel.metric in LOWER_IS_BETTER else max
    return pick(values, default=None)


def _cell(point: Point | None, mark: str, *, bold: bool) -> Text:
    if point is None:
        return Text(NOTHING, style="dim")
    cell = Text(short_number(point.value) + mark, style="bold" if bold else "")
    if not point.has_interval:
        return cell
    return cell.append(f" [{short_number(point.low)}, {short_number(point.high)}]", style="not bold dim")
