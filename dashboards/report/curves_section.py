"""Sections of budget curves: each metric against the budget, and whether the reward survives eviction."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from dashboards.figures.curves import draw_panels, points_table
from dashboards.figures.drawing import Figure
from dashboards.figures.series import Panel, band_note, direction, split_full
from dashboards.figures.styles import setting_label, short_metric
from dashboards.grouping import Place
from dashboards.rendering.formats import number, sentence
from dashboards.report.document import Block, missing, prose
from dashboards.report.view import ReportView, section, short
from kvpolicy.results.metrics import ANALYSES


@section("curves", "Budget curves")
def curves_section(view: ReportView) -> Iterator[Block]:
    """Budget curves of each benchmark, setting and metric: the mean over tasks, then each task."""
    yield prose(
        "The budget is what each KV head keeps, in tokens. Fidelity comes first: the KL divergence to the full "
        "cache's predictions, which also tells methods apart on tasks that the model itself fails."
    )
    for place in view.places:
        metrics = view.metrics(place)
        yield from _means(view, place, metrics)
        for metric in metrics:
            _, tasks = view.panels_of(place, metric)
            if len(tasks) > 1:
                yield _picture(tasks, f"The same by task: {short(place)}, {short_metric(metric)}", by_task=True)


@section("reward", "Does the reward survive eviction?")
def reward_section(view: ReportView) -> Iterator[Block]:
    """Future attention on compacted caches: its correlation with that on the full one, and the share that was lost."""
    yield prose(
        "Policies are trained on the attention that the full cache receives. If eviction changed that attention, "
        "the training signal would not hold. The rank correlation is over the entries that a head kept; the missed "
        "mass is the share of the full cache's future attention that went to entries that were evicted."
    )
    for place in view.places:
        means = [view.panels_of(place, metric)[0] for metric in ANALYSES]
        if drawn := [panel for panel in means if panel is not None]:
            yield _picture(drawn, f"Does the reward survive eviction? {short(place)}")
        else:
            yield missing(
                f"future attention recomputed on compacted caches ({short(place)})",
                "`kvp evaluate --set evaluate.num_analysed=1` measures it on a sample of each task.",
            )


def _means(view: ReportView, place: Place, metrics: Sequence[str]) -> Iterator[Block]:
    panels = [panel for metric in metrics if (panel := view.panels_of(place, metric)[0]) is not None]
    if panels:
        yield _picture(panels, f"Budget curves, mean over tasks: {short(place)}")
    else:
        yield missing(f"a mean over tasks ({short(place)})", "`kvp evaluate` adds it for every curve.")


def _picture(panels: Sequence[Panel], title: str, *, by_task: bool = False) -> Figure:
    """Panels of several metrics of one place, or of several tasks by one metric."""
    kept, notes = zip(*map(split_full, panels), strict=True)
    names = [panel.task if by_task else short_metric(panel.metric) for panel in panels]
    lines = [f"{name}<br>{note}" if note else name for name, note in zip(names, notes, strict=True)]
    lead = "One panel a task, each with a scale of its own" if by_task else sentence(setting_label(panels[0].setting))
    height = 130 + 300 * -(-len(panels) // 3)
    return Figure(
        drawing=draw_panels(kept, lines, height=height),
        height=height,
        title=title,
        note=f"{lead}. {_directions(panels)}; {band_note(panels)}.",
        label=_alt(panels, title),
        tables=tuple(map(points_table, panels)),
    )


def _directions(panels: Sequence[Panel]) -> str:
    ways = groupby(sorted(panels, key=lambda p: direction(p.metric), reverse=True), key=lambda p: direction(p.metric))
    parts = [
        f"{way} in {', '.join(dict.fromkeys(short_metric(panel.metric) for panel in alike))}" for way, alike in ways
    ]
    return sentence("; ".join(parts) if len(parts) > 1 else direction(panels[0].metric))


def _alt(panels: Sequence[Panel], title: str) -> str:
    methods = dict.fromkeys(line.method for panel in panels for line in panel.series)
    first = panels[0]
    ends = "; ".join(
        f"{line.method} from {number(line.points[0].value)} to {number(line.points[-1].value)}" for line in first.series
    )
    return (
        f"{title}. Line charts of {len(methods)} methods over budgets of {first.budgets[0]} to {first.budgets[-1]} "
        f"tokens; {band_note(panels)}. In the first panel ({short_metric(first.metric)}, {first.task}): {ends}. All "
        "values are in the tables below."
    )
