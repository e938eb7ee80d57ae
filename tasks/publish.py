"""Publishing an evaluation: what the scores of its examples add up to, into the catalog and into MLflow."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from kvpolicy.comparisons import Comparison, beats_all, compare_methods
from kvpolicy.curves import budget_curves
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.methods.registry import METHODS
from kvpolicy.metrics import METRICS
from kvpolicy.statistics import Interval, bootstrap_mean
from storage.catalog import Artifact, RunRecorder
from storage.digests import digest_json
from storage.home import Home
from storage.tracking import Tracking
from tasks.analyse import read_findings
from tasks.curve_runs import Evaluation, publish_curves_of, start_evaluation
from tasks.evaluate import judged_inputs, read_costs, read_scores
from tasks.model import model_spec
from tasks.references import EvaluationRef, ModelRef, PromptsRef, ShardRef, TrainedRef
from tasks.stage import Stage, StageOutcome, run_stage, stage_task


def evaluation_stage(
    model: ModelRef, trained: Sequence[TrainedRef], prompts: PromptsRef, config: EvaluateConfig, *, seed: int
) -> Stage:
    """The stage of a whole evaluation."""
    told = {key: value for key, value in dataclasses.asdict(config).items() if key != "examples_per_shard"}
    return Stage(
        name="evaluate",
        module=__name__,
        inputs=judged_inputs(model, prompts, trained),
        parameters={"evaluate": told, "dtype": model.dtype},
        choices=METHODS.choices(config.contenders),
        seed=seed,
    )


@stage_task("publish-curves")
def publish_curves(
    home: Home,
    model: ModelRef,
    trained: Sequence[TrainedRef],
    prompts: PromptsRef,
    stage: Stage,
    *,
    config: EvaluateConfig,
    shards: Sequence[ShardRef],
    analyses: Sequence[ShardRef] = (),
) -> tuple[EvaluationRef, StageOutcome]:
    """Add up the scores of all shards, and publish every curve.

    Args:
        home: The home.
        model: The model.
        trained: Policy sets and soft tokens that took part.
        prompts: What they were judged on.
        stage: The evaluation's stage.
        config: What was judged.
        shards: The scores of all examples.
        analyses: The scores and findings of those that were analysed.
    """
    parts = {f"shard_{index:04d}": shard.artifact_id for index, shard in enumerate(shards)}
    parts |= {f"analysis_{index:04d}": shard.artifact_id for index, shard in enumerate(analyses)}
    whole = dataclasses.replace(stage, parts=parts)

    def body(run: RunRecorder) -> None:
        scores = read_scores([*shards, *analyses])
        statistics: dict[str, Any] = {
            "seed": stage.seed or 0,
            "num_resamples": config.num_resamples,
            "confidence": config.confidence,
        }
        comparisons = compare_methods(scores, **statistics)
        benchmarks = list(dict.fromkeys(score.benchmark for score in scores))
        artifact = Artifact(
            kind="evaluation",
            digest=digest_json([stage.key, *parts.values()]),
            name=f"{model.name} on {', '.join(benchmarks)}, {prompts.num_samples} samples",
            metadata={"beats_all": list(_wins(comparisons, benchmarks, config.settings))},
        )
        conditions = {
            "dtype": model.dtype,
            "max_answer_tokens": str(config.max_answer_tokens or "the task's"),
            "chunk_tokens": str(config.chunk_tokens or "none"),
            "prompts": prompts.artifact_id,
        }
        evaluation = start_evaluation(
            home, model, trained, prompts, artifact=artifact, benchmarks=benchmarks, conditions=conditions
        )
        run.mlflow_run_id = evaluation.parent_run_id
        run.output("evaluation", artifact)
        publish_curves_of(run, evaluation, budget_curves(scores, **statistics))
        Tracking(home).finish(evaluation.parent_run_id, timestamp_ms=evaluation.timestamp_ms)
        own = {"evaluation_id": artifact.artifact_id}
        run.append("scores", [own | dataclasses.asdict(score) for score in scores])
        of_model = own | {"model_digest": model.digest}
        run.append("comparisons", [of_model | entry.to_row() for entry in comparisons])
        run.append("findings", [of_model | row for row in _finding_rows(read_findings(analyses), **statistics)])
        run.append("head_costs", _head_costs(evaluation, shards))

    outcome = run_stage(home, whole, body)
    reference = EvaluationRef(
        artifact_id=outcome.outputs["evaluation"], run_id=outcome.run_id, mlflow_run_id=outcome.mlflow_run_id
    )
    return reference, outcome


def _wins(
    comparisons: Sequence[Comparison], benchmarks: Sequence[str], settings: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Where the learned policy is better than every baseline, budget by budget."""
    for benchmark, setting, metric in product(benchmarks, settings, METRICS):
        wins = beats_all(comparisons, benchmark=benchmark, setting=setting, metric=metric)
        if wins:
            budgets = {str(budget): won for budget, won in wins.items()}
            yield {"benchmark": benchmark, "setting": setting, "metric": metric, "budgets": budgets}


_FINDING = ("benchmark", "setting", "analysis", "quantity", "method", "seed", "budget", "larger_budget")


def _finding_rows(findings: Sequence[dict[str, Any]], **statistics: Any) -> list[dict[str, Any]]:
    """Findings of single examples as means with intervals."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for finding in findings:
        groups[tuple(finding[name] for name in _FINDING)].append(finding)
    rows = []
    for name, own in groups.items():
        values = np.array([finding["value"] for finding in own])
        interval = bootstrap_mean(values, strata=[finding["task"] for finding in own], **statistics)
        rows.append(
            {**dict(zip(_FINDING, name, strict=True)), "value": interval.mean, **_ends(interval), "n": len(own)}
        )
    return rows


def _ends(interval: Interval) -> dict[str, float | None]:
    return dict(zip(("ci_low", "ci_high"), interval.ends, strict=True))


def _head_costs(evaluation: Evaluation, shards: Sequence[ShardRef]) -> list[dict[str, Any]]:
    """Mean cost of each head over all examples, for every contender and setting."""
    costs: dict[tuple[str, str, str, int], list[list[float]]] = defaultdict(list)
    for row in read_costs(shards):
        costs[row["benchmark"], row["setting"], row["method"], row["seed"]].append(row["costs"])
    spec = model_spec(evaluation.home, evaluation.model)
    return [
        {
            "evaluation_id": evaluation.evaluation_id,
            "benchmark": benchmark,
            "policy_set_id": evaluation.trained_id(method, seed),
            "model_digest": evaluation.model.digest,
            "setting": setting,
            "method": method,
            "seed": seed,
            "head": head,
            "head_name": spec.head_name(head),
            "cost": cost,
            "n": len(examples),
        }
        for (benchmark, setting, method, seed), examples in costs.items()
        for head, cost in enumerate(np.mean(examples, axis=0).tolist())
    ]
