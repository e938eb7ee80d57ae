"""Section: training of the policies, against other objectives on the same traces."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean, stdev

import plotly.graph_objects as go

from dashboards.figures.drawing import Figure, cell, log_axis, new_grid
from dashboards.grouping import grouped
from dashboards.rendering.formats import NOTHING, counted, duration, number, percent, with_interval
from dashboards.rendering.table import Table, table
from dashboards.report.document import Block, Section, missing, prose
from dashboards.report.evaluated_section import agent_words
from dashboards.report.evaluation_rows import Training
from dashboards.report.view import ReportView, section
from kvpolicy.results.objectives import ObjectiveRow

_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#882255", "#E69F00", "#332288", "#44AA99", "#999933")  # Okabe-Ito, Tol
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "star", "x")
_DASHES = ("solid", "dash", "dashdot", "dot")
Curve = Sequence[tuple[float, float]]


@section("training", "Training")
def _section(view: ReportView) -> Iterator[Block]:
    trainings = [*view.rows.trainings, *view.rows.other_trainings]
    if not trainings:
        yield missing("a training of policies", "`kvp run` with `kvp` among the methods trains them.")
        return
    yield prose(
        "The held-out cost is the normalised eviction cost on validation traces that no policy was trained on, mean "
        "over heads; 1 is optimal. Losses of different objectives have no common scale; held-out costs have."
    )
    if any(map(cost_by_step, trainings)):
        yield _picture(trainings)
    else:
        yield missing("held-out costs during training", "`kvp train` adds them to the table metrics.")
    if not any(map(cost_by_second, trainings)):
        yield missing("seconds of training by step", "`kvp train` of this release adds them to the table metrics.")
    yield _outcomes(view, trainings)
    if view.rows.objective_comparisons:
        yield _objectives(view.rows.objective_comparisons, view.rows.trainings[0].objective)
    else:
        yield missing(
            "another objective with the evaluated policies' options, seeds and traces",
            "`kvp ablate` with the same options trains them.",
        )


def training_section(view: ReportView) -> Section:
    """Held-out cost against steps and seconds; outcomes by objective."""
    others = view.rows.other_trainings
    more = {
        "other policy sets": [training.policy_set_id for training in others],
        "their runs": [training.run.id for training in others],
    }
    made = _section(view)
    return replace(made, origin={**made.origin, **more})


def cost_by_step(training: Training) -> Curve:
    """(step, held-out cost), ascending."""
    return sorted(training.measured("heldout_cost").items())


def cost_by_second(training: Training) -> Curve:
    """(seconds of training, held-out cost), where seconds were recorded."""
    seconds = training.measured("seconds")
    return [(seconds[step], cost) for step, cost in cost_by_step(training) if step in seconds]


def _groups(trainings: Sequence[Training]) -> list[list[Training]]:
    """Trainings that differ by nothing but the seed."""
    groups = grouped(trainings, lambda one: json.dumps([one.parameters, one.snapshot_ids], sort_keys=True))
    return sorted(groups.values(), key=lambda group: (group[0].objective, _final(group), group[0].policy_set_id))


def _final(group: Sequence[Training]) -> float:
    return fmean(training.mean_cost for training in group)


def _label(group: Sequence[Training]) -> str:
    parameters = group[0].parameters
    width = parameters.get("agent", {}).get("width")
    parts = (group[0].objective, f"{parameters.get('num_steps', '?')} steps", f"width {width}" if width else "")
    return ", ".join(filter(None, (*parts, counted(len(group), "seed"))))


def _picture(trainings: Sequence[Training]) -> Figure:
    groups = _groups(trainings)
    ends = "; ".join(f"{_label(group)}: {number(_final(group))} at the end" for group in groups)
    return Figure(
        drawing=draw_courses(trainings),
        height=420 + 22 * len(groups),
        title="Held-out cost during training",
        note="One line a policy set, seeds of one configuration in one colour; both axes are logarithmic. A curve "
        "is the mean over heads, measured every so many steps.",
        label=f"Line charts of held-out cost against training. {ends}. All values are in the table below.",
        tables=(_steps_table(trainings),),
    )


def draw_courses(trainings: Sequence[Training]) -> go.Figure:
    """Held-out cost against steps, and against seconds where these were recorded."""
    curves_of = {"training steps": cost_by_step}
    if any(map(cost_by_second, trainings)):
        curves_of["seconds of training"] = cost_by_second
    drawing = new_grid([""] * len(curves_of), columns=len(curves_of), gap_pixels=0, height=420, legend_below=True)
    for column, (words, curve_of) in enumerate(curves_of.items()):
        drawn: list[Curve] = []
        place = cell(column, len(curves_of))
        for look, group in enumerate(_groups(trainings)):
            for number_in_group, training in enumerate(group):
                if points := curve_of(training):
                    drawn.append(points)
                    drawing.add_scatter(
                        name=_label(group),
                        legendgroup=_label(group),
                        showlegend=column == number_in_group == 0,
                        x=[x for x, _ in points],
                        y=[cost for _, cost in points],
                        mode="lines+markers",
                        line={"color": _COLOURS[look % len(_COLOURS)], "dash": _DASHES[look // len(_COLOURS) % 4]},
                        marker={"symbol": _SYMBOLS[look % len(_SYMBOLS)], "size": 6},
                        **place,
                    )
        xs, costs = zip(*chain.from_iterable(drawn), strict=True)
        drawing.update_xaxes(log_axis(words, xs), **place)
        drawing.update_yaxes(log_axis("held-out cost (1 is optimal)", costs), **place)
    return drawing


def _steps_table(trainings: Sequence[Training]) -> Table:
    return table(
        "Held-out cost by step",
        ("policy set", "objective", "seed", "step: cost (seconds)"),
        [
            (training.policy_set_id, training.objective, str(training.seed), _course(training))
            for training in trainings
            if cost_by_step(training)
        ],
        num_labels=4,
    )


def _course(training: Training) -> str:
    seconds = training.measured("seconds")
    return ", ".join(
        f"{step:.0f}: {number(cost)}" + (f" ({duration(seconds[step])})" if step in seconds else "")
        for step, cost in cost_by_step(training)
    )


def _outcomes(view: ReportView, trainings: Sequence[Training]) -> Table:
    evaluated = {training.policy_set_id for training in view.rows.trainings}
    rows = []
    for first, *others in _groups(trainings):
        group = [first, *others]
        costs = [training.mean_cost for training in group]
        ends = f"{number(stdev(costs))} [{number(min(costs))}, {number(max(costs))}]" if others else NOTHING
        row = {
            "objective": first.objective,
            "agent": agent_words(first),
            "steps": str(first.parameters.get("num_steps", NOTHING)),
            "learning rate": str(first.parameters.get("learning_rate", NOTHING)),
            "seeds": str(len(group)),
            "held-out cost": number(fmean(costs)),
            "std over seeds [least, most]": ends,
            "worst head": number(max(max(training.costs, default=math.nan) for training in group)),
            "time": duration(fmean(training.seconds for training in group)),
            "evaluated here": "yes" if any(training.policy_set_id in evaluated for training in group) else "no",
        }
        rows.append(row)
    return table(
        "Training outcomes on the same traces, by objective",
        rows[0],
        [row.values() for row in rows],
        note="exact and rloo are two estimators of the policy gradient; the others are supervised surrogates. Mean "
        "over heads and seeds; brackets: the seeds' range. Time: mean over seeds, all groups of heads added up.",
        num_labels=2,
    )


def _objectives(comparisons: Sequence[ObjectiveRow], evaluated: str) -> Table:
    return table(
        "Objectives with the evaluated policies' options, paired by head and seed",
        ("objective", "held-out cost [interval]", "minus the evaluated one [interval]", "better heads", "seeds"),
        [
            (
                row.objective + (" (evaluated)" if row.objective == evaluated else ""),
                with_interval(row.cost.mean, *row.cost.ends),
                *_against(row, evaluated),
                str(row.num_seeds),
            )
            for row in comparisons
        ],
        note="Lower is better. Heads are the sample: an interval says how far the mean over heads would move with "
        "other heads of this model and, where there are several, with other seeds. The learning rate is the evaluated "
        "policies'; another objective may do better with one of its own.",
    )


def _against(row: ObjectiveRow, evaluated: str) -> tuple[str, str]:
    """The difference to the evaluated policies' objective, and the share of heads that are better."""
    if row.objective == evaluated:
        return NOTHING, NOTHING
    return with_interval(row.difference.mean, *row.difference.ends, signed=True), percent(row.heads_better)
