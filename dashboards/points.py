"""Every point of a panel of budget curves as a table."""

from dashboards.formats import NOTHING, number, with_interval
from dashboards.series import Panel, Point, direction
from dashboards.styles import metric_label
from dashboards.tables import Table, table


def points_table(panel: Panel, *, folded: bool = False) -> Table:
    """Every point of a panel: methods by budgets."""
    points = {(line.method, point.budget): point for line in panel.series for point in line.points}
    return table(
        f"{panel.label}: {metric_label(panel.metric)}",
        ("method", *map(str, panel.budgets)),
        [(line.method, *(_cell(points.get((line.method, b))) for b in panel.budgets)) for line in panel.series],
        note=f"Value [interval] by budget; {direction(panel.metric)}; {_counts(panel)}.{_exception(panel)}",
        folded=folded,
    )


def _exception(panel: Panel) -> str:
    points = [point for line in panel.series for point in line.points]
    return (
        "" if all(point.has_interval for point in points) else " A value alone has no interval: a task has one sample."
    )


def _cell(point: Point | None) -> str:
    if point is None:
        return NOTHING
    return with_interval(point.value, point.low, point.high) if point.has_interval else number(point.value)


def _counts(panel: Panel) -> str:
    counts = sorted({point.num_samples for line in panel.series for point in line.points})
    return f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} samples"
