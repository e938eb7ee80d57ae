"""One budget curve as an MLflow run, an artifact and rows of the catalog."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvpolicy.benchmarks.registry import tasks_of
from kvpolicy.digests import digest_json
from kvpolicy.methods.registry import method_type
from kvpolicy.names import MEAN_TASK
from kvpolicy.results.budget_curves import CurvePoint
from storage.catalog.catalog import Artifact, Catalog, RunRecorder
from storage.home import Home
from storage.mlflow.tracking import CurveRun, DatasetRef, Tracking
from tasks.framework.references import ModelRef, PromptsRef, TrainedRef


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveName:
    """What one MLflow run holds: everything of one method but the budget, the task and the metric."""

    benchmark: str
    setting: str
    method: str
    seed: int

    def of_run(self, *, names_benchmark: bool) -> str:
        """Name of the MLflow run."""
        parts = [self.method, self.setting, *([self.benchmark] if names_benchmark else [])]
        return " ".join(parts if self.seed == 0 else [*parts, f"seed {self.seed}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What published curves belong to.

    Attributes:
        home: The home.
        model: The model.
        trained: Policy sets and soft tokens that took part.
        prompts: The prompts of the evaluation.
        evaluation_id: Artifact of the evaluation.
        parent_run_id: The MLflow run that curves are nested under.
        timestamp_ms: Of everything that goes into MLflow.
        conditions: What holds for all curves, as parameters of their MLflow runs.
    """

    home: Home
    model: ModelRef
    trained: Sequence[TrainedRef]
    prompts: PromptsRef
    evaluation_id: str
    parent_run_id: str
    timestamp_ms: int
    conditions: Mapping[str, str]

    def trained_id(self, method: str, seed: int) -> str:
        """Artifact that a contender was made from; empty where it is made from nothing."""
        kind = method_type(method).trained
        return next((ref.artifact_id for ref in self.trained if (ref.kind, ref.seed) == (kind, seed)), "")


def start_evaluation(
    home: Home,
    model: ModelRef,
    trained: Sequence[TrainedRef],
    prompts: PromptsRef,
    *,
    artifact: Artifact,
    benchmarks: Sequence[str],
    conditions: Mapping[str, str],
) -> Evaluation:
    """Start the MLflow run that curves are nested under."""
    catalog, tracking = Catalog(home), Tracking(home)
    tracking.prepare()
    # Publishing again after a crash must find the same MLflow runs, so their time is that of something that stays.
    timestamp_ms = catalog.created_at_ms(trained[0].artifact_id if trained else prompts.artifact_id)
    parent = tracking.start_parent(
        experiment=model.name,
        name=f"evaluate {', '.join(benchmarks)}",
        tags={"kvp.stage": "evaluate", "kvp.model_id": model.artifact_id, "kvp.evaluation_id": artifact.artifact_id},
        timestamp_ms=timestamp_ms,
    )
    return Evaluation(
        home=home,
        model=model,
        trained=trained,
        prompts=prompts,
        evaluation_id=artifact.artifact_id,
        parent_run_id=parent,
        timestamp_ms=timestamp_ms,
        conditions=conditions,
    )


def publish_curves_of(run: RunRecorder, evaluation: Evaluation, points: Iterable[CurvePoint]) -> None:
    """Publish every curve that the points make up."""
    curves: dict[CurveName, list[CurvePoint]] = defaultdict(list)
    for point in points:
        name = CurveName(benchmark=point.benchmark, setting=point.setting, method=point.method, seed=point.seed)
        curves[name].append(point)
    several = len({name.benchmark for name in curves}) > 1
    for name, points_of_curve in curves.items():
        _publish_curve(run, evaluation, name, points_of_curve, names_benchmark=several)


def _publish_curve(
    run: RunRecorder, evaluation: Evaluation, name: CurveName, points: Sequence[CurvePoint], *, names_benchmark: bool
) -> None:
    plain = [[p.task, p.metric, p.budget, p.interval.mean, p.interval.low, p.interval.high] for p in points]
    parts = dataclasses.asdict(name)
    curve = Artifact(
        kind="curve",
        digest=digest_json([evaluation.evaluation_id, parts, plain]),
        name=f"{name.method} on {name.benchmark}, {name.setting}, seed {name.seed}",
        metadata=parts,
    )
    run.output(f"curve {name.benchmark} {name.setting} {name.method} {name.seed}", curve)
    tags = {
        "stage": "curve",
        "curve_id": curve.artifact_id,
        "evaluation_id": evaluation.evaluation_id,
        "model_id": evaluation.model.artifact_id,
        "policy_set_id": evaluation.trained_id(name.method, name.seed),
        "method": name.method,
        "benchmark": name.benchmark,
        "benchmark_version": tasks_of(name.benchmark)[0].version,
        "setting": name.setting,
        "seed": str(name.seed),
    }
    mlflow_run_id = Tracking(evaluation.home).log_curve(
        CurveRun(
            experiment=evaluation.model.name,
            parent_run_id=evaluation.parent_run_id,
            name=name.of_run(names_benchmark=names_benchmark),
            tags={f"kvp.{key}": value for key, value in tags.items()},
            params={**{key: str(value) for key, value in parts.items()}, **evaluation.conditions},
            points=[metric for point in points for metric in _metrics(point)],
            timestamp_ms=evaluation.timestamp_ms,
            datasets=[
                DatasetRef(
                    name=f"{name.benchmark}-test",
                    digest=Catalog(evaluation.home).artifact(evaluation.prompts.artifact_id).digest,
                    uri=evaluation.prompts.path,
                    context="evaluation",
                )
            ],
        )
    )
    run.append("curves", [_curve_row(evaluation, point, curve.artifact_id, mlflow_run_id) for point in points])


def _curve_row(evaluation: Evaluation, point: CurvePoint, curve_id: str, mlflow_run_id: str) -> dict[str, Any]:
    return {
        "evaluation_id": evaluation.evaluation_id,
        "mlflow_run_id": mlflow_run_id,
        "curve_id": curve_id,
        "model_id": evaluation.model.artifact_id,
        "model_digest": evaluation.model.digest,
        "policy_set_id": evaluation.trained_id(point.method, point.seed),
        **{name: value for name, value in vars(point).items() if name != "interval"},
        **point.interval.as_row("value"),
    }


def _metrics(point: CurvePoint) -> list[tuple[str, int, float]]:
    """MLflow's points: the mean over tasks has the plain name and its interval, a task's is grouped under its name."""
    if point.task != MEAN_TASK:
        return [(f"{point.task}/{point.metric}", point.budget, point.interval.mean)]
    ends = zip(("low", "high"), point.interval.ends, strict=True)
    return [
        (point.metric, point.budget, point.interval.mean),
        *((f"interval/{point.metric}_{name}", point.budget, end) for name, end in ends if end is not None),
    ]
