"""Publishing an evaluation: what the scores of its examples add up to, into the catalog and into MLflow."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar, Self

import numpy as np

from kvpolicy.comparisons import Comparison, beats_all, compare_methods
from kvpolicy.curves import budget_curves
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.metrics import METRICS
from kvpolicy.pipeline import PipelineConfig
from kvpolicy.registry import Choice
from kvpolicy.statistics import Interval, bootstrap_mean
from storage.catalog import Artifact, RunRecorder
from storage.digests import digest_json
from storage.home import Home
from storage.tracking import Tracking
from tasks.analyse import analyse_shard, read_findings
from tasks.curve_runs import Evaluation, publish_curves_of, start_evaluation
from tasks.evaluate import chosen, evaluate_shard, judged_inputs, read_costs, read_scores
from tasks.model import model_spec
from tasks.references import EvaluationRef, ModelRef, PromptsRef, ShardRef, TrainedRef, prompts_ref, trained_ref
from tasks.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.wholeness import check_files, declare_kind
from tasks.work import Part, Plan, Record, Work, slices

declare_kind("evaluation", check_files())
declare_kind("curve", check_files())


def evaluation_stage(
    model: ModelRef, trained: Sequence[TrainedRef], prompts: PromptsRef, config: EvaluateConfig, *, seed: int
) -> Stage:
    """The stage of a whole evaluation."""
    judged = {key: value for key, value in dataclasses.asdict(config).items() if key != "examples_per_shard"}
    return Stage(
        name="evaluate",
        module=__name__,
        inputs=judged_inputs(model, prompts, trained),
        parameters={"evaluate": judged, "dtype": model.dtype},
        choices=chosen(config, prompts.benchmarks),
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
        of_evaluation = {"evaluation_id": artifact.artifact_id}
        run.append("scores", [of_evaluation | dataclasses.asdict(score) for score in scores])
        of_model = of_evaluation | {"model_digest": model.digest}
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
    for name, alike in groups.items():
        values = np.array([finding["value"] for finding in alike])
        interval = bootstrap_mean(values, strata=[finding["task"] for finding in alike], **statistics)
        rows.append(
            {**dict(zip(_FINDING, name, strict=True)), "value": interval.mean, **_ends(interval), "n": len(alike)}
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


def _repeat_shard(record: Record) -> tuple[ShardRef, StageOutcome]:
    work, first = EvaluationWork.recorded(record), record.parameters["first"]
    given = (work.home, work.model, work.trained, work.prompts, work.config)
    repeated: tuple[ShardRef, StageOutcome] = evaluate_shard(*given, first=first, seed=work.seed)
    return repeated


def _repeat_analysis(record: Record) -> tuple[ShardRef, StageOutcome]:
    work, examples = EvaluationWork.recorded(record), (record.parameters["first"], record.parameters["stop"])
    given = (work.home, work.model, work.trained, work.prompts, work.config)
    repeated: tuple[ShardRef, StageOutcome] = analyse_shard(*given, examples=examples, seed=work.seed)
    return repeated


@dataclass(frozen=True, kw_only=True)
class EvaluationWork(Work):
    """The evaluation of all methods on all test prompts, shard by shard."""

    name: ClassVar[str] = "evaluate"
    title: ClassVar[str] = "evaluate"
    result: ClassVar[str] = "evaluation"
    part_kinds: ClassVar[Mapping[str, Part]] = {
        "evaluate-shard": Part(module="tasks.evaluate", repeat=_repeat_shard),
        "analyse-shard": Part(module="tasks.analyse", repeat=_repeat_analysis),
    }

    home: Home
    model: ModelRef
    trained: tuple[TrainedRef, ...]
    prompts: PromptsRef
    config: EvaluateConfig
    seed: int

    @property
    def stage(self) -> Stage:
        """The stage."""
        return evaluation_stage(self.model, self.trained, self.prompts, self.config, seed=self.seed)

    @classmethod
    def planned(cls, plan: Plan) -> Iterator[Self]:
        """One, with everything that its methods are made from."""
        prompts, kinds = plan.made.get(("prompts", "test")), plan.config.evaluate.trained_kinds
        made = [reference for reference in plan.made.values() if isinstance(reference, TrainedRef)]
        trained = [reference for reference in made if reference.kind in kinds]
        if prompts and len(trained) == len(plan.policy_seeds) * len(kinds):
            yield cls(
                home=plan.home,
                model=plan.model,
                trained=tuple(trained),
                prompts=prompts,
                config=plan.config.evaluate,
                seed=plan.seed,
            )

    @classmethod
    def recorded(cls, record: Record) -> Self:
        """The recorded evaluation, or the one that a recorded shard is a part of."""
        roles = [role for role in record.known.inputs if role.startswith(("policy_", "soft_tokens_"))]
        return cls(
            home=record.home,
            model=record.model(),
            trained=tuple(trained_ref(record.home, record.artifact(role).artifact_id) for role in roles),
            prompts=prompts_ref(record.home, record.artifact("prompts").artifact_id, seed=record.seed),
            config=record.config.evaluate,
            seed=record.seed,
        )

    @classmethod
    def choices(cls, config: PipelineConfig) -> tuple[Choice, ...]:
        """The methods and benchmarks."""
        prompts, _ = config.prompts_of("test")
        return chosen(config.evaluate, prompts.benchmarks)

    @classmethod
    def count_parts(cls, plan: Plan) -> int:
        """The shards that are evaluated, and those that are analysed."""
        prompts, config = plan.made[("prompts", "test")], plan.config.evaluate
        return len(evaluated_examples(prompts, config)) + len(_analysed_examples(prompts, config))

    def parts(self) -> "list[partial[Any]]":
        """Each shard."""
        given = (self.home, self.model, self.trained, self.prompts, self.config)
        return [
            *(
                partial(evaluate_shard, *given, first=first, seed=self.seed)
                for first, _ in evaluated_examples(self.prompts, self.config)
            ),
            *(
                partial(analyse_shard, *given, examples=examples, seed=self.seed)
                for examples in _analysed_examples(self.prompts, self.config)
            ),
        ]

    def finish(self, made: Sequence[tuple[ShardRef, StageOutcome]]) -> tuple[EvaluationRef, StageOutcome]:
        """Publish the curves."""
        shards, num_evaluated = [shard for shard, _ in made], len(evaluated_examples(self.prompts, self.config))
        published: tuple[EvaluationRef, StageOutcome] = publish_curves(
            self.home,
            self.model,
            self.trained,
            self.prompts,
            self.stage,
            config=self.config,
            shards=shards[:num_evaluated],
            analyses=shards[num_evaluated:],
        )
        return published


def evaluated_examples(prompts: PromptsRef, config: EvaluateConfig) -> list[tuple[int, int]]:
    """First and last, exclusive, of the examples of each shard."""
    return slices(prompts.num_samples, config.examples_per_shard)


def _analysed_examples(prompts: PromptsRef, config: EvaluateConfig) -> list[tuple[int, int]]:
    # Prompts lie task by task in turn, so the first of every task are the first of all.
    return slices(prompts.num_samples * config.num_analysed // config.num_samples, config.examples_per_shard)
