"""Evaluating: one task a shard of examples. What the figures add up to is the business of `tasks.publish`.

Beside the figures a shard keeps every ranking of some of its examples token by token, for people to look at.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpolicy.benchmarks.registry import BENCHMARKS
from kvpolicy.curves import ExampleScore
from kvpolicy.evaluation import Contender, EvaluateConfig, ExampleResult, RankedContext, Score, evaluate_example
from kvpolicy.methods.registry import METHODS, make_method, method_type
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import cut_sample
from kvpolicy.registry import Choice
from kvpolicy.sample import Sample
from kvpolicy.seeds import derive_seed
from kvpolicy.token_text import token_pieces
from storage.catalog import Artifact, Catalog, RunRecorder
from storage.digests import digest_json
from storage.home import Home
from storage.parquet import read_rows, write_rows
from storage.token_ranks import StoredContext, StoredRanking, digest_of, write_token_ranks
from storage.token_ranks import is_whole as has_whole_ranks
from tasks.loaded_model import load_model
from tasks.progress import progress
from tasks.references import ModelRef, PromptsRef, ShardRef, TrainedRef
from tasks.samples import read_encoded, read_samples, sample_row
from tasks.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.trained import method_parameters
from tasks.wholeness import are_readable, check_files, declare_kind

SCORES, COSTS = "scores.parquet", "costs.parquet"


def _is_whole_shard(folder: Path, digest: str) -> bool:
    return are_readable(SCORES, COSTS)(folder, digest) and has_whole_ranks(folder)


declare_kind("evaluation_shard", check_files(_is_whole_shard))


@stage_task("evaluate-shard")
def evaluate_shard(
    home: Home,
    model: ModelRef,
    trained: Sequence[TrainedRef],
    prompts: PromptsRef,
    config: EvaluateConfig,
    *,
    first: int,
    seed: int,
) -> tuple[ShardRef, StageOutcome]:
    """Judge examples `first` to `first + examples_per_shard` of a set by every method at every budget."""
    stop = min(first + config.examples_per_shard, prompts.num_samples)
    stage = Stage(
        name="evaluate-shard",
        module=__name__,
        inputs=judged_inputs(model, prompts, trained),
        parameters={
            **judged_parameters(config),
            "num_generated": config.num_generated,
            "max_answer_tokens": config.max_answer_tokens,
            "num_ranked": config.num_ranked,
            "chunk_tokens": config.chunk_tokens,
            "dtype": model.dtype,
            "first": first,
            "stop": stop,
        },
        choices=chosen(config, prompts.benchmarks),
        seed=seed,
    )

    def body(run: RunRecorder) -> None:
        language_model = load_model(model)
        tokenizer = language_model.tokenizer
        contenders = make_contenders(config, trained, model, str(language_model.device))
        scores, costs, samples, contexts = [], [], [], []
        num_ranked = 0 if config.chunk_tokens else config.num_ranked
        tasks = [sample.task for sample in read_samples(prompts)]
        with progress("evaluate", stop - first, "examples") as advance:
            for index, example in enumerate(read_encoded(prompts, model, slice(first, stop)), start=first):
                place = tasks[:index].count(example.sample.task)  # among the samples of its task
                result = evaluate_example(
                    language_model,
                    example,
                    contenders,
                    config.budgets,
                    settings=config.settings,
                    sample_seed=derive_seed(seed, example.sample.sample_id),
                    generate=place < config.num_generated,
                    max_answer_tokens=config.max_answer_tokens,
                    chunk_tokens=config.chunk_tokens,
                    keep_rankings=place < num_ranked,
                )
                scores += [score_row(example.sample, score) for score in result.scores]
                costs += _cost_rows(example.sample, result)
                contexts += [_stored(example, context, config.budgets, tokenizer) for context in result.contexts]
                samples += [sample_row(example, setting, prompts, model) for setting in config.settings]
                advance(example.sample.task)
        digest = digest_json([scores, costs, digest_of(contexts)])
        folder = home.evaluations / "shards" / digest[:16]
        write_rows(folder / SCORES, scores)
        write_rows(folder / COSTS, costs)
        write_token_ranks(folder, contexts)
        run.append("samples", samples)
        name = f"examples {first} to {stop - 1} of {prompts.artifact_id}"
        run.output("shard", Artifact(kind="evaluation_shard", digest=digest, name=name, uri=str(folder)))

    outcome = run_stage(home, stage, body, note_skip=False)
    artifact = Catalog(home).artifact(outcome.outputs["shard"])
    return ShardRef(artifact_id=artifact.artifact_id, path=artifact.uri), outcome


def chosen(config: EvaluateConfig, benchmarks: Sequence[str]) -> tuple[Choice, ...]:
    """The methods that are evaluated, and the benchmarks that say what is measured."""
    return (*METHODS.choices(config.contenders), *BENCHMARKS.choices(benchmarks))


def judged_inputs(model: ModelRef, prompts: PromptsRef, trained: Sequence[TrainedRef]) -> dict[str, str]:
    """What an evaluation reads, as inputs of a stage: role to artifact id."""
    return {
        "model": model.artifact_id,
        "prompts": prompts.artifact_id,
        **{reference.role: reference.artifact_id for reference in trained},
    }


def judged_parameters(config: EvaluateConfig) -> dict[str, Any]:
    """Who is judged, at which budgets and in which settings, as parameters of a stage."""
    return {
        "contenders": list(config.contenders),
        "budgets": list(config.budgets),
        "settings": list(config.settings),
        "num_random_seeds": config.num_random_seeds,
    }


def read_scores(shards: Sequence[ShardRef]) -> list[ExampleScore]:
    """Scores of all examples of some shards."""
    return [ExampleScore(**row) for shard in shards for row in read_rows(Path(shard.path) / SCORES)]


def read_costs(shards: Sequence[ShardRef]) -> list[dict[str, Any]]:
    """What rankings cost each head: a row for every example, setting and contender."""
    return [row for shard in shards for row in read_rows(Path(shard.path) / COSTS)]


def make_contenders(
    config: EvaluateConfig, trained: Sequence[TrainedRef], model: ModelRef, device: str
) -> list[Contender]:
    """Every method with every seed that it takes part with."""
    given = {(ref.kind, ref.seed): method_parameters(ref, model, device) for ref in trained}
    contenders = []
    for name in config.contenders:
        kind = method_type(name).trained
        if kind:
            by_seed = {seed: parameters for (of_kind, seed), parameters in given.items() if of_kind == kind}
        else:
            by_seed = {seed: {} for seed in range(config.num_random_seeds if name == "random" else 1)}
        contenders += [Contender(method=make_method(name, **made), seed=seed) for seed, made in by_seed.items()]
    return contenders


def score_row(sample: Sample, score: Score) -> dict[str, Any]:
    """A score with the sample that it is of."""
    of_sample = {"sample_id": sample.sample_id, "benchmark": sample.benchmark, "task": sample.task}
    return of_sample | dataclasses.asdict(score)


def _stored(example: EncodedSample, context: RankedContext, budgets: Sequence[int], tokenizer: Any) -> StoredContext:
    sample, num_context = example.sample, cut_sample(example, context.setting).num_context
    return StoredContext(
        sample_id=sample.sample_id,
        benchmark=sample.benchmark,
        task=sample.task,
        setting=context.setting,
        budgets=tuple(budgets),
        pieces=tuple(token_pieces((*example.context_ids, *example.question_ids)[:num_context], tokenizer)),
        importance=context.importance.float().numpy(),
        rankings=tuple(
            StoredRanking(
                method=ranking.method,
                seed=ranking.seed,
                ranks=ranking.ranks.numpy().astype(np.int32),
                kept=ranking.kept.numpy().astype(np.int32),
            )
            for ranking in context.rankings
        ),
    )


def _cost_rows(sample: Sample, result: ExampleResult) -> list[dict[str, Any]]:
    return [
        {
            "sample_id": sample.sample_id,
            "benchmark": sample.benchmark,
            "setting": ranked.setting,
            "method": ranked.method,
            "seed": ranked.seed,
            "costs": torch.as_tensor(ranked.costs).tolist(),
        }
        for ranked in result.head_costs
    ]
