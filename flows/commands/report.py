"""The command `kvp report`: one evaluation's figures and tables, as a page and as Markdown."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.options import HomeOption
from flows.runtime.process import configure_libraries, home_path
from storage.errors import StorageError, one_line
from storage.home import Home

if TYPE_CHECKING:
    from dashboards.report.evaluation_rows import ReportRows, Training
    from storage.catalog.catalog import Catalog


def report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="An evaluation, its run, an MLflow run, or one of its curves; 6+ first characters do"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and report.md [default: the evaluation's figures]", metavar="FOLDER"),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Write a report of one evaluation: its figures and tables, with where every number is from."""
    configure_libraries()
    from dashboards.report.evaluation_rows import read_report_rows
    from dashboards.report.writing import write_report
    from flows.display.figures import figure_folder
    from storage.catalog.catalog import Catalog

    opened = Home.open(home_path(home), create=False)
    catalog = Catalog(opened)
    rows = read_report_rows(catalog, run)
    rows = replace(
        rows,
        task_comparisons=list(task_comparisons(catalog, rows)),
        objective_comparisons=list(objective_comparisons(catalog, rows)),
    )
    folder = figure_folder(opened, rows.evaluation_id) if out is None else out
    try:
        for path in write_report(rows, folder):
            print(path)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from error
    except ValueError as error:
        raise StorageError(f"report: {rows.evaluation_id} cannot be drawn: {one_line(error)}") from error


def task_comparisons(catalog: "Catalog", rows: "ReportRows") -> Iterator[dict[str, Any]]:
    """Every method against every other within single tasks, by the metric that leads.

    The catalog has comparisons of the mean over tasks; those of a task are made of the same scores, with the same
    resamples, as the evaluation's own parameters say.

    Args:
        catalog: The catalog.
        rows: The evaluation.

    Yields:
        Rows like those of its `comparisons`, each with its task.
    """
    from dashboards.report.claims import ordered_metrics
    from kvpolicy.results.budget_curves import ExampleScore, resample_scores
    from kvpolicy.results.comparisons import compare_methods
    from tasks.inputs.stored_scores import stored_bootstrap, stored_scores

    bootstrap = stored_bootstrap(catalog, rows.run_id)
    metrics: dict[str, set[str]] = {}
    for row in rows.curves:
        metrics.setdefault(row["benchmark"], set()).add(row["metric"])
    for benchmark, measured in metrics.items():
        for metric in ordered_metrics(measured)[:1]:
            of_task: dict[str, list[ExampleScore]] = {}
            for score in stored_scores(catalog, rows.run_id, benchmark=benchmark, metric=metric):
                of_task.setdefault(score.task, []).append(score)
            for task, scores in of_task.items():
                for comparison in compare_methods(resample_scores(scores, bootstrap)):
                    yield comparison.to_row() | {"task": task}


def objective_comparisons(catalog: "Catalog", rows: "ReportRows") -> Iterator[dict[str, Any]]:
    """Training objectives against the judged policies' own, where nothing but the objective differs.

    Args:
        catalog: The catalog.
        rows: The evaluation with its trainings; of each objective those count that have the seeds of all.
    """
    from kvpolicy.training.ablation import ObjectiveOutcome, compare_objectives
    from tasks.inputs.stored_scores import stored_bootstrap

    if not rows.trainings:
        return
    outcomes_by_objective: dict[str, dict[int, ObjectiveOutcome]] = {}
    for training in [*rows.trainings, *rows.other_trainings]:
        if _besides_objective(training) == _besides_objective(rows.trainings[0]):
            outcome = ObjectiveOutcome(
                objective=training.objective,
                seed=training.run["seed"],
                heldout_cost=training.costs,
                train_s=training.seconds,
            )
            outcomes_by_objective.setdefault(training.objective, {})[outcome.seed] = outcome
    shared = set.intersection(*(set(seeds) for seeds in outcomes_by_objective.values()))
    if len(outcomes_by_objective) < 2 or not shared:
        return
    judged = rows.trainings[0].objective
    outcomes = [seeds[seed] for seeds in outcomes_by_objective.values() for seed in sorted(shared)]
    bootstrap = stored_bootstrap(catalog, rows.run_id)
    for row in compare_objectives(outcomes, reference=judged, **asdict(bootstrap)):
        difference, cost = row.difference, row.cost
        yield {
            "objective": row.objective,
            "is_judged": row.objective == judged,
            "cost": cost.mean,
            "cost_low": cost.ends[0],
            "cost_high": cost.ends[1],
            "difference": difference.mean,
            "ci_low": difference.ends[0],
            "ci_high": difference.ends[1],
            "heads_better": row.heads_better,
            "num_seeds": row.num_seeds,
        }


def _besides_objective(training: "Training") -> tuple[Mapping[str, Any], tuple[str, ...]]:
    options = {name: value for name, value in training.parameters.items() if name not in ("objective", "num_rankings")}
    return options, training.snapshot_ids
