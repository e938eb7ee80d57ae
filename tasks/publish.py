"""Publishing an evaluation: curves with intervals into the catalog and into MLflow, one run a curve."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpolicy.benchmarks.registry import tasks_of
from kvpolicy.curves import MEAN_TASK, CurvePoint, beats_all, budget_curves, compare_with_heuristics
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.metrics import METRICS
from storage.catalog import Artifact, Catalog, RunRecorder
from storage.digests import digest_json
from storage.home import Home
from storage.tracking import CurveRun, DatasetRef, Tracking
from tasks.evaluate import read_costs, read_scores
from tasks.model import model_spec
from tasks.references import EvaluationRef, ModelRef, PromptsRef, ShardRef, TrainedRef
from tasks.stage import Stage, StageOutcome, run_stage, stage_task

CurveName = tuple[str, str, int]  # setting, method, seed: one MLflow run each


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """What a published curve belongs to."""

    home: Home
    model: ModelRef
    policies: dict[int, TrainedRef]
    prompts: PromptsRef
    benchmark: str
    evaluation_id: str
    parent_run_id: str
    timestamp_ms: int
    conditions: dict[str, str]

    def policy_of(self, method: str, seed: int) -> TrainedRef | None:
        return self.policies.get(seed) if method == "kvp" else None


def evaluation_stage(
    model: ModelRef,
    policies: Sequence[TrainedRef],
    prompts: PromptsRef,
    config: EvaluateConfig,
    *,
    benchmark: str,
    seed: int,
) -> Stage:
    """The stage of a whole evaluation."""
    return Stage(
        name="evaluate",
        module=__name__,
        inputs={
            "model": model.artifact_id,
            "prompts": prompts.artifact_id,
            **{f"policy_{policy.seed}": policy.artifact_id for policy in policies},
        },
        parameters={
            "evaluate": {
                key: value for key, value in dataclasses.asdict(config).items() if key != "examples_per_shard"
            },
            "benchmark": benchmark,
            "dtype": model.dtype,
        },
        seed=seed,
    )


@stage_task("publish-curves")
def publish_curves(
    home: Home,
    model: ModelRef,
    policies: Sequence[TrainedRef],
    prompts: PromptsRef,
    stage: Stage,
    *,
    config: EvaluateConfig,
    shards: Sequence[ShardRef],
) -> tuple[EvaluationRef, StageOutcome]:
    """Add up the scores of all shards, and publish every curve.

    Args:
        home: The home.
        model: The model.
        policies: Policy sets that took part.
        prompts: What they were judged on.
        stage: The evaluation's stage.
        config: What was judged.
        shards: The scores of all examples.
    """
    benchmark = str(stage.parameters["benchmark"])
    whole = dataclasses.replace(
        stage, parts={f"shard_{index:04d}": shard.artifact_id for index, shard in enumerate(shards)}
    )

    def body(run: RunRecorder) -> None:
        scores = read_scores(shards)
        statistics: dict[str, Any] = {
            "seed": stage.seed or 0,
            "num_resamples": config.num_resamples,
            "confidence": config.confidence,
        }
        points = budget_curves(scores, **statistics)
        comparisons = compare_with_heuristics(scores, **statistics)
        digest = digest_json([stage.key, *(shard.artifact_id for shard in shards)])
        artifact = Artifact(
            kind="evaluation",
            digest=digest,
            name=f"{model.name} on {benchmark}, {prompts.num_samples} samples",
            metadata={
                "comparisons": [dataclasses.asdict(entry) for entry in comparisons],
                "beats_all": [
                    {
                        "setting": setting,
                        "metric": metric,
                        "budgets": {str(budget): won for budget, won in wins.items()},
                    }
                    for setting in config.settings
                    for metric in METRICS
                    if (wins := beats_all(comparisons, setting=setting, metric=metric))
                ],
            },
        )
        conditions = {
            "dtype": model.dtype,
            "max_answer_tokens": str(config.max_answer_tokens or "the task's"),
            "prompts": prompts.artifact_id,
        }
        evaluation = _start(
            home, model, policies, prompts, artifact=artifact, benchmark=benchmark, conditions=conditions
        )
        run.mlflow_run_id = evaluation.parent_run_id
        run.output("evaluation", artifact)
        curves: dict[CurveName, list[CurvePoint]] = defaultdict(list)
        for point in points:
            curves[point.setting, point.method, point.seed].append(point)
        for name, own in curves.items():
            _publish_curve(run, evaluation, name, own)
        Tracking(home).finish(evaluation.parent_run_id, timestamp_ms=evaluation.timestamp_ms)
        keep = ("sample_id", "task", "setting", "method", "seed", "budget", "metric", "value")
        run.append(
            "scores",
            [{"evaluation_id": artifact.artifact_id, **{k: getattr(score, k) for k in keep}} for score in scores],
        )
        run.append("head_costs", _head_costs(evaluation, shards))

    outcome = run_stage(home, whole, body)
    reference = EvaluationRef(
        artifact_id=outcome.outputs["evaluation"], run_id=outcome.run_id, mlflow_run_id=outcome.mlflow_run_id
    )
    return reference, outcome


def _start(
    home: Home,
    model: ModelRef,
    policies: Sequence[TrainedRef],
    prompts: PromptsRef,
    *,
    artifact: Artifact,
    benchmark: str,
    conditions: dict[str, str],
) -> _Evaluation:
    catalog, tracking = Catalog(home), Tracking(home)
    tracking.prepare()
    # Publishing again after a crash must find the same MLflow runs, so their time is that of something that stays.
    judged = policies[0].artifact_id if policies else prompts.artifact_id
    timestamp_ms = catalog.created_at_ms(judged)
    parent = tracking.start_parent(
        experiment=model.name,
        name=f"evaluate {benchmark}",
        tags={"kvp.stage": "evaluate", "kvp.model_id": model.artifact_id, "kvp.evaluation_id": artifact.artifact_id},
        timestamp_ms=timestamp_ms,
    )
    return _Evaluation(
        home=home,
        model=model,
        policies={policy.seed: policy for policy in policies},
        prompts=prompts,
        benchmark=benchmark,
        evaluation_id=artifact.artifact_id,
        parent_run_id=parent,
        timestamp_ms=timestamp_ms,
        conditions=conditions,
    )


def _publish_curve(run: RunRecorder, evaluation: _Evaluation, name: CurveName, points: Sequence[CurvePoint]) -> None:
    """One MLflow run, one artifact, and a row for every point."""
    setting, method, seed = name
    benchmark = evaluation.benchmark
    policy = evaluation.policy_of(method, seed)
    plain = [[p.task, p.metric, p.budget, p.interval.mean, p.interval.low, p.interval.high] for p in points]
    curve = Artifact(
        kind="curve",
        digest=digest_json([evaluation.evaluation_id, benchmark, *name, plain]),
        name=f"{method} on {benchmark}, {setting}, seed {seed}",
        metadata={"method": method, "benchmark": benchmark, "setting": setting, "seed": seed},
    )
    run.output(f"curve {setting} {method} {seed}", curve)
    policy_id = "" if policy is None else policy.artifact_id
    mlflow_run_id = Tracking(evaluation.home).log_curve(
        CurveRun(
            experiment=evaluation.model.name,
            parent_run_id=evaluation.parent_run_id,
            name=f"{method} {setting}" if seed == 0 else f"{method} {setting} seed {seed}",
            tags={
                "kvp.stage": "curve",
                "kvp.curve_id": curve.artifact_id,
                "kvp.evaluation_id": evaluation.evaluation_id,
                "kvp.model_id": evaluation.model.artifact_id,
                "kvp.policy_set_id": policy_id,
                "kvp.method": method,
                "kvp.benchmark": benchmark,
                "kvp.benchmark_version": tasks_of(benchmark)[0].version,
                "kvp.setting": setting,
                "kvp.seed": str(seed),
            },
            params={
                "method": method,
                "benchmark": benchmark,
                "setting": setting,
                "seed": str(seed),
                **evaluation.conditions,
            },
            points=[metric for point in points for metric in _metrics(point)],
            timestamp_ms=evaluation.timestamp_ms,
            datasets=[
                DatasetRef(
                    name=f"{benchmark}-test",
                    digest=Catalog(evaluation.home).artifact(evaluation.prompts.artifact_id).digest,
                    uri=evaluation.prompts.path,
                    context="evaluation",
                )
            ],
        )
    )
    run.append(
        "curves",
        [
            {
                "evaluation_id": evaluation.evaluation_id,
                "mlflow_run_id": mlflow_run_id,
                "curve_id": curve.artifact_id,
                "model_id": evaluation.model.artifact_id,
                "model_digest": evaluation.model.digest,
                "policy_set_id": policy_id,
                "method": method,
                "benchmark": benchmark,
                "task": point.task,
                "setting": setting,
                "metric": point.metric,
                "budget": point.budget,
                "value": point.interval.mean,
                "ci_low": ends[0],
                "ci_high": ends[1],
                "n": point.interval.n,
                "seed": seed,
            }
            for point in points
            for ends in [_ends(point)]
        ],
    )


def _metrics(point: CurvePoint) -> list[tuple[str, int, float]]:
    """MLflow's points: the mean over tasks has the plain name and its interval, a task's is grouped under its name."""
    if point.task != MEAN_TASK:
        return [(f"{point.task}/{point.metric}", point.budget, point.interval.mean)]
    ends = zip(("low", "high"), _ends(point), strict=True)
    return [
        (point.metric, point.budget, point.interval.mean),
        *((f"interval/{point.metric}_{name}", point.budget, end) for name, end in ends if end is not None),
    ]


def _ends(point: CurvePoint) -> tuple[float | None, float | None]:
    """Ends of the interval; none where some task has a single example, whose spread is unknown."""
    if point.interval.smallest_stratum == 1:
        return None, None
    return point.interval.low, point.interval.high


def _head_costs(evaluation: _Evaluation, shards: Sequence[ShardRef]) -> list[dict[str, Any]]:
    """Mean cost of each head over all examples, for every contender and setting."""
    costs: dict[CurveName, list[list[float]]] = defaultdict(list)
    for row in read_costs(shards):
        costs[row["setting"], row["method"], row["seed"]].append(row["costs"])
    spec = model_spec(evaluation.home, evaluation.model)
    rows = []
    for (setting, method, seed), examples in costs.items():
        policy = evaluation.policy_of(method, seed)
        for head, cost in enumerate(np.mean(examples, axis=0).tolist()):
            rows.append(
                {
                    "evaluation_id": evaluation.evaluation_id,
                    "policy_set_id": "" if policy is None else policy.artifact_id,
                    "model_digest": evaluation.model.digest,
                    "setting": setting,
                    "method": method,
                    "seed": seed,
                    "head": head,
                    "head_name": spec.head_name(head),
                    "cost": cost,
                    "n": len(examples),
                }
            )
    return rows
