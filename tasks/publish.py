"""Publishing an evaluation: what the scores of its examples add up to, into the catalog and into MLflow."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Self

import numpy as np

from kvpolicy.config.registry import Choice
from kvpolicy.digests import digest_json
from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.presets.pipeline_config import PipelineConfig
from kvpolicy.results.budget_curves import budget_curves, resample_scores
from kvpolicy.results.comparisons import Comparison, beats_all, compare_methods
from kvpolicy.results.metrics import METRICS
from kvpolicy.results.statistics import Bootstrap
from storage.catalog.catalog import Artifact, RunRecorder
from storage.home import Home
from storage.mlflow.tracking import Tracking
from tasks.analyse import analyse_shard, read_findings
from tasks.curve_runs import Evaluation, publish_curves_of, start_evaluation
from tasks.evaluate import ExampleGroup, chosen, contender_refs, evaluate_shard, read_costs, read_scores
from tasks.framework.references import (
    EvaluationRef,
    ModelRef,
    PromptsRef,
    ShardRef,
    TrainedRef,
    prompts_ref,
    trained_ref,
)
from tasks.framework.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.framework.wholeness import check_files, declare_kind
from tasks.framework.work import Part, Plan, Record, Work, slices
from tasks.model import model_spec

Published = tuple[EvaluationRef, StageOutcome]

declare_kind("evaluation", check_files())
declare_kind("curve", check_files())


@stage_task("publish-curves")
def publish_curves(work: "EvaluationWork", shards: Sequence[ShardRef], analyses: Sequence[ShardRef] = ()) -> Published:
    """Add up the scores of all shards, and publish every curve.

    Args:
        work: The evaluation.
        shards: The scores of all examples.
        analyses: The scores and findings of those that were analysed.
    """
    home, model, prompts, config = work.home, work.model, work.prompts, work.config
    parts = {shard.role: shard.artifact_id for shard in (*shards, *analyses)}
    stage = replace(work.stage, parts=parts)

    def body(run: RunRecorder) -> None:
        scores = read_scores([*shards, *analyses])
        bootstrap = Bootstrap(seed=work.seed, num_resamples=config.num_resamples, confidence=config.confidence)
        tables = resample_scores(scores, bootstrap)
        points, comparisons = budget_curves(tables), compare_methods(tables, config.trained)
        benchmarks = list(dict.fromkeys(score.benchmark for score in scores))
        artifact = Artifact(
            kind="evaluation",
            digest=digest_json([stage.key, *parts.values()]),
            name=f"{model.name} on {', '.join(benchmarks)}, {prompts.num_samples} samples",
            metadata={"beats_all": _wins(comparisons, config.trained)},
        )
        conditions = {
            "dtype": model.dtype,
            "max_answer_tokens": str(config.max_answer_tokens or "the task's"),
            "chunk_tokens": str(config.chunk_tokens or "none"),
            "prompts": prompts.artifact_id,
        }
        evaluation = start_evaluation(
            home, model, work.trained, prompts, artifact=artifact, benchmarks=benchmarks, conditions=conditions
        )
        run.mlflow_run_id = evaluation.parent_run_id
        run.output("evaluation", artifact)
        publish_curves_of(run, evaluation, points)
        Tracking(home).finish(evaluation.parent_run_id, timestamp_ms=evaluation.timestamp_ms)
        of_evaluation = {"evaluation_id": artifact.artifact_id}
        run.append("scores", [of_evaluation | asdict(score) for score in scores])
        of_model = of_evaluation | {"model_digest": model.digest}
        run.append("comparisons", [of_model | entry.to_row() for entry in comparisons])
        run.append("findings", [of_model | row for row in _finding_rows(read_findings(analyses), bootstrap)])
        run.append("head_costs", _head_costs(evaluation, shards))

    outcome = run_stage(home, stage, body)
    reference = EvaluationRef(
        artifact_id=outcome.outputs["evaluation"], run_id=outcome.run_id, mlflow_run_id=outcome.mlflow_run_id
    )
    return reference, outcome


def _wins(comparisons: Sequence[Comparison], trained: Mapping[str, str]) -> list[dict[str, Any]]:
    """Where the learned policy is better than every baseline, budget by budget, in the order of the metrics."""
    wins = sorted(beats_all(comparisons, trained).items(), key=lambda win: list(METRICS).index(win[0][2]))
    return [
        {
            "benchmark": benchmark,
            "setting": setting,
            "metric": metric,
            "budgets": {str(budget): won for budget, won in budgets.items()},
        }
        for (benchmark, setting, metric), budgets in wins
    ]


_FINDING = ("benchmark", "setting", "analysis", "quantity", "method", "seed", "budget", "larger_budget")


def _finding_rows(findings: Sequence[dict[str, Any]], bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """Findings of single examples as means with intervals."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for finding in findings:
        groups[tuple(finding[name] for name in _FINDING)].append(finding)
    rows = []
    for name, alike in groups.items():
        values = np.array([finding["value"] for finding in alike])
        interval = bootstrap.mean(values, strata=[finding["task"] for finding in alike])
        rows.append({**dict(zip(_FINDING, name, strict=True)), **interval.as_row("value")})
    return rows


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


def _repeat_part(task: Callable[[Home, ExampleGroup], list[ShardRef]], record: Record) -> list[ShardRef]:
    parameters = record.parameters
    group = EvaluationWork.recorded(record).group((parameters["first"], parameters["stop"]))
    name = (parameters["method"], parameters["method_seed"])
    places = [place for place, ref in enumerate(group.contenders) if (ref.method, ref.seed) == name]
    return task(record.home, group.only(places))


@dataclass(frozen=True, kw_only=True)
class EvaluationWork(Work):
    """The evaluation of all methods on all test prompts, some examples at a time."""

    name: ClassVar[str] = "evaluate"
    title: ClassVar[str] = "evaluate"
    result: ClassVar[str] = "evaluation"
    part_kinds: ClassVar[Mapping[str, Part]] = {
        "evaluate-shard": Part(module="tasks.evaluate", repeat=partial(_repeat_part, evaluate_shard)),
        "analyse-shard": Part(module="tasks.analyse", repeat=partial(_repeat_part, analyse_shard)),
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
        trained = {reference.role: reference.artifact_id for reference in self.trained}
        evaluated = {key: value for key, value in asdict(self.config).items() if key != "examples_per_shard"}
        return Stage(
            name=self.name,
            module=__name__,
            inputs={"model": self.model.artifact_id, "prompts": self.prompts.artifact_id, **trained},
            parameters={"evaluate": evaluated, "dtype": self.model.dtype},
            choices=chosen(self.config.contenders, self.prompts.benchmarks),
            seed=self.seed,
        )

    def group(self, examples: tuple[int, int]) -> ExampleGroup:
        """All contenders on some examples: the first, and the one after the last."""
        first, stop = examples
        return ExampleGroup(
            model=self.model,
            prompts=self.prompts,
            contenders=contender_refs(self.config, self.trained),
            config=self.config,
            first=first,
            stop=stop,
            seed=self.seed,
        )

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
        """The recorded evaluation, or of the one that a recorded shard is a part of what the shard read."""
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
    def choices(cls, config: PipelineConfig, parameters: Mapping[str, Any]) -> tuple[Choice, ...]:
        """The methods, of a part its own, and the benchmarks."""
        prompts, _ = config.prompts_of("test")
        methods = [parameters["method"]] if "method" in parameters else config.evaluate.contenders
        return chosen(methods, prompts.benchmarks)

    @classmethod
    def count_parts(cls, plan: Plan) -> int:
        """Groups of examples that are evaluated, and those that are analysed."""
        prompts, config = plan.made[("prompts", "test")], plan.config.evaluate
        return len(evaluated_examples(prompts, config)) + len(_analysed_examples(prompts, config))

    def parts(self) -> "list[partial[Any]]":
        """All contenders on some examples, each."""
        tasks = (
            (evaluate_shard, evaluated_examples(self.prompts, self.config)),
            (analyse_shard, _analysed_examples(self.prompts, self.config)),
        )
        return [partial(task, self.home, self.group(examples)) for task, groups in tasks for examples in groups]

    def finish(self, made: Sequence[list[ShardRef]]) -> Published:
        """Publish the curves."""
        num_evaluated = len(evaluated_examples(self.prompts, self.config))
        shards, analyses = (chain.from_iterable(part) for part in (made[:num_evaluated], made[num_evaluated:]))
        published: Published = publish_curves(self, list(shards), list(analyses))
        return published


def evaluated_examples(prompts: PromptsRef, config: EvaluateConfig) -> list[tuple[int, int]]:
    """First and last, exclusive, of the examples that are evaluated at once."""
    return slices(prompts.num_samples, config.examples_per_shard)


def _analysed_examples(prompts: PromptsRef, config: EvaluateConfig) -> list[tuple[int, int]]:
    # Prompts lie task by task in turn, so the first of every task are the first of all.
    return slices(prompts.num_samples * config.num_analysed // config.num_samples, config.examples_per_shard)
