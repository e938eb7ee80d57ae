"""Every point of a panel of budget curves as a table."""

from dashboards.figures.series import Panel, Point, direction
from dashboards.figures.styles import metric_label
from dashboards.rendering.formats import NOTHING, number, samples, with_interval
from dashboards.rendering.table import Table, table


def points_table(panel: Panel, *, folded: bool = False) -> Table:
    """Every point of a panel: methods by budgets."""
    points = panel.points
    counts = samples(point.num_samples for point in points.values())
    exception = " A value alone has no interval: a task has one sample."
    if all(point.has_interval for point in points.values()):
        exception = ""
    return table(
        f"{panel.label}: {metric_label(panel.metric)}",
        ("method", *map(str, panel.budgets)),
        [(line.method, *(point_words(points.get((line.method, b))) for b in panel.budgets)) for line in panel.series],
        note=f"Value [interval] by budget; {direction(panel.metric)}; {counts}.{exception}",
        folded=folded,
    )


def point_words(point: Point | None) -> str:
    """The value of a point with its interval, where there is one."""
    if point is None:
        return NOTHING
    return with_interval(point.value, point.low, point.high) if point.has_interval else number(point.value)
