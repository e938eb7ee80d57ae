"""Comparisons within single tasks and between objectives, which the catalog lacks, made from its rows."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dashboards.figures.styles import made_from
from dashboards.report.claims import ordered_metrics
from dashboards.report.evaluation_rows import ReportRows, Training
from kvpolicy.results.budget_curves import resample_scores
from kvpolicy.results.comparisons import compare_methods
from kvpolicy.results.objectives import ObjectiveOutcome, ObjectiveRow, compare_objectives
from kvpolicy.results.scores import ExampleScore
from storage.catalog.catalog import Catalog
from storage.catalog.stored_scores import stored_bootstrap, stored_scores


def task_comparisons(catalog: Catalog, rows: ReportRows) -> Iterator[dict[str, Any]]:
    """Compare every method with every other within single tasks, by the metric that leads.

    The catalog has comparisons of the mean over tasks; those of a task are made of the same scores, with the same
    resamples, as the evaluation's parameters say.

    Args:
        catalog: the catalog.
        rows: the evaluation.

    Yields:
        Rows like those of its `comparisons`, each with its task.
    """
    bootstrap, trained = stored_bootstrap(catalog, rows.run_id), made_from(rows.curves)
    metrics: dict[str, set[str]] = defaultdict(set)
    for row in rows.curves:
        metrics[row["benchmark"]].add(row["metric"])
    for benchmark, measured in metrics.items():
        for metric in ordered_metrics(measured)[:1]:
            of_task: dict[str, list[ExampleScore]] = defaultdict(list)
            for score in stored_scores(catalog, rows.run_id, benchmark=benchmark, metric=metric):
                of_task[score.task].append(score)
            for task, scores in of_task.items():
                for comparison in compare_methods(resample_scores(scores, bootstrap), trained):
                    yield comparison.to_row() | {"task": task}


def objective_comparisons(catalog: Catalog, rows: ReportRows) -> Sequence[ObjectiveRow]:
    """Compare training objectives with that of the evaluated policies, where nothing but the objective differs.

    Args:
        catalog: the catalog.
        rows: the evaluation with its trainings; of each objective those count that have the seeds of all.
    """
    if not rows.trainings:
        return []
    outcomes_by_objective: dict[str, dict[int, ObjectiveOutcome]] = defaultdict(dict)
    for training in [*rows.trainings, *rows.other_trainings]:
        if _besides_objective(training) == _besides_objective(rows.trainings[0]):
            outcomes_by_objective[training.objective][training.seed] = ObjectiveOutcome(
                objective=training.objective,
                seed=training.seed,
                heldout_cost=training.costs,
                train_s=training.seconds,
            )
    shared = set.intersection(*(set(seeds) for seeds in outcomes_by_objective.values()))
    if len(outcomes_by_objective) < 2 or not shared:
        return []
    outcomes = [seeds[seed] for seeds in outcomes_by_objective.values() for seed in sorted(shared)]
    return compare_objectives(outcomes, stored_bootstrap(catalog, rows.run_id), reference=rows.trainings[0].objective)


def _besides_objective(training: Training) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    options = {name: value for name, value in training.parameters.items() if name not in ("objective", "num_rankings")}
    return options, training.snapshot_ids
