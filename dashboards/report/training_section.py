"""Section: how the policies learned, and what other objectives reach on the same traces."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev

import plotly.graph_objects as go

from dashboards.figures.drawing import Figure, cell, log_axis, new_grid
from dashboards.rendering.formats import NOTHING, counted, duration, number, percent, with_interval
from dashboards.rendering.table import Table, table
from dashboards.report.document import Block, Section, missing, prose
from dashboards.report.evaluation_rows import Row, Training
from dashboards.report.judged import agent_words
from dashboards.report.view import ReportView, section

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
    curves = {training.policy_set_id: cost_by_step(training) for training in trainings}
    if any(curves.values()):
        yield _picture(trainings, curves)
    else:
        yield missing("held-out costs during training", "`kvp train` adds them to the table metrics.")
    if not any(cost_by_second(training) for training in trainings):
        yield missing("seconds of training by step", "`kvp train` of this release adds them to the table metrics.")
    yield _outcomes(view, trainings)
    if view.rows.objective_comparisons:
        yield _objectives(view.rows.objective_comparisons)
    else:
        yield missing(
            "another objective with the judged policies' options, seeds and traces",
            "`kvp ablate` with the same options trains them.",
        )


def training_section(view: ReportView) -> Section:
    """Held-out cost against steps and seconds; outcomes by objective."""
    others = view.rows.other_trainings
    more = {
        "other policy sets": [training.policy_set_id for training in others],
        "their runs": [training.run["run_id"] for training in others],
    }
    made = _section(view)
    return replace(made, origin={**made.origin, **more})


def cost_by_step(training: Training) -> Curve:
    """(step, held-out cost), ascending."""
    return sorted((row["step"], row["value"]) for row in training.curve if row["name"] == "heldout_cost")


def cost_by_second(training: Training) -> Curve:
    """(seconds of training, held-out cost), where seconds were recorded."""
    seconds = {row["step"]: row["value"] for row in training.curve if row["name"] == "seconds"}
    return [(seconds[step], cost) for step, cost in cost_by_step(training) if step in seconds]


def _groups(trainings: Sequence[Training]) -> list[list[Training]]:
    """Trainings that differ by nothing but the seed."""
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        key = json.dumps([training.parameters, training.snapshot_ids], sort_keys=True)
        groups.setdefault(key, []).append(training)
    return sorted(groups.values(), key=lambda group: (group[0].objective, _final(group), group[0].policy_set_id))


def _final(group: Sequence[Training]) -> float:
    return fmean(_mean_cost(training) for training in group)


def _mean_cost(training: Training) -> float:
    return fmean(training.costs) if training.costs else float("nan")


def _label(group: Sequence[Training]) -> str:
    first = group[0]
    steps = f"{first.parameters.get('num_steps', '?')} steps"
    return f"{first.objective}, {steps}, {_width(first)}{counted(len(group), 'seed')}"


def _width(training: Training) -> str:
    width = training.parameters.get("agent", {}).get("width")
    return f"width {width}, " if width else ""


def _picture(trainings: Sequence[Training], curves: Mapping[str, Curve]) -> Figure:
    groups = _groups(trainings)
    ends = "; ".join(f"{_label(group)}: {number(_final(group))} at the end" for group in groups)
    return Figure(
        drawing=draw_courses(trainings),
        height=420 + 22 * len(groups),
        title="Held-out cost during training",
        note="One line a policy set, seeds of one configuration in one colour; both axes are logarithmic. A curve "
        "is the mean over heads, measured every so many steps.",
        label=f"Line charts of held-out cost against training. {ends}. All values are in the table below.",
        tables=(_steps_table(trainings, curves),),
    )


def draw_courses(trainings: Sequence[Training]) -> go.Figure:
    """Held-out cost against steps, and against seconds where these were recorded."""
    curves_of = {"training steps": cost_by_step}
    if any(cost_by_second(training) for training in trainings):
        curves_of["seconds of training"] = cost_by_second
    drawing = new_grid([""] * len(curves_of), columns=len(curves_of), gap_pixels=0, height=420, legend_below=True)
    for column, (words, curve_of) in enumerate(curves_of.items()):
        drawn: list[Curve] = []
        for place, group in enumerate(_groups(trainings)):
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
                        line={"color": _COLOURS[place % len(_COLOURS)], "dash": _DASHES[place // len(_COLOURS) % 4]},
                        marker={"symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": 6},
                        **cell(column, len(curves_of)),
                    )
        axes = [log_axis(words, (x for curve in drawn for x, _ in curve))]
        axes.append(log_axis("held-out cost (1 is optimal)", (cost for curve in drawn for _, cost in curve)))
        drawing.update_xaxes(axes[0], **cell(column, len(curves_of)))
        drawing.update_yaxes(axes[1], **cell(column, len(curves_of)))
    return drawing


def _steps_table(trainings: Sequence[Training], curves: Mapping[str, Curve]) -> Table:
    return table(
        "Held-out cost by step",
        ("policy set", "objective", "seed", "step: cost (seconds)"),
        [
            (training.policy_set_id, training.objective, str(training.run["seed"]), _course(training))
            for training in trainings
            if curves[training.policy_set_id]
        ],
        num_labels=4,
    )


def _course(training: Training) -> str:
    seconds = {row["step"]: row["value"] for row in training.curve if row["name"] == "seconds"}
    return ", ".join(
        f"{step:.0f}: {number(cost)}" + (f" ({duration(seconds[step])})" if step in seconds else "")
        for step, cost in cost_by_step(training)
    )


def _outcomes(view: ReportView, trainings: Sequence[Training]) -> Table:
    judged = {training.policy_set_id for training in view.rows.trainings}
    rows = []
    for group in _groups(trainings):
        costs = [_mean_cost(training) for training in group]
        first = group[0]
        spread = f"{number(stdev(costs))} [{number(min(costs))}, {number(max(costs))}]" if len(costs) > 1 else NOTHING
        rows.append(
            (
                first.objective,
                agent_words(first),
                str(first.parameters.get("num_steps", NOTHING)),
                str(first.parameters.get("learning_rate", NOTHING)),
                str(len(group)),
                number(fmean(costs)),
                spread,
                number(max(max(training.costs, default=float("nan")) for training in group)),
                duration(fmean(training.seconds for training in group)),
                "yes" if any(training.policy_set_id in judged for training in group) else "no",
            )
        )
    return table(
        "Training outcomes on the same traces, by objective",
        (
            "objective",
            "agent",
            "steps",
            "learning rate",
            "seeds",
            "held-out cost",
            "std over seeds [least, most]",
            "worst head",
            "time",
            "judged here",
        ),
        rows,
        note="exact and rloo are two estimators of the policy gradient; the others are supervised surrogates. Mean "
        "over heads and seeds; brackets: the seeds' range. Time: mean over seeds, all groups of heads added up.",
        num_labels=2,
    )


def _objectives(comparisons: Sequence[Row]) -> Table:
    return table(
        "Objectives with the judged policies' options, paired by head and seed",
        ("objective", "held-out cost [interval]", "minus the judged one [interval]", "heads that are better", "seeds"),
        [
            (
                row["objective"] + (" (judged)" if row["is_judged"] else ""),
                with_interval(row["cost"], row["cost_low"], row["cost_high"]),
                NOTHING
                if row["is_judged"]
                else with_interval(row["difference"], row["ci_low"], row["ci_high"], signed=True),
                NOTHING if row["is_judged"] else percent(row["heads_better"]),
                str(row["num_seeds"]),
            )
            for row in comparisons
        ],
        note="Lower is better. Heads are the sample: an interval says how far the mean over heads would move with "
        "other heads of this model and, where there are several, with other seeds. The learning rate is the judged "
        "policies'; another objective may do better with one of its own.",
    )
