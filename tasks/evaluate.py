"""Evaluating: one task for some examples, one shard of figures for each contender on them.

What the figures add up to is the business of `tasks.publish`. Beside its figures a shard keeps the contender's ranking
of some examples token by token, for people to look at.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpolicy.benchmarks.registry import BENCHMARKS
from kvpolicy.config.registry import Choice
from kvpolicy.digests import digest_json
from kvpolicy.evaluation import (
    Contender,
    EvaluateConfig,
    EvaluatedExample,
    ExampleResult,
    HeadCosts,
    TokenRanking,
    evaluate_examples,
)
from kvpolicy.methods.registry import METHODS, make_method, method_type
from kvpolicy.results.scores import ExampleScore, Score
from kvpolicy.seeds import derive_seed
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import cut_sample
from kvpolicy.text.sample import Sample
from kvpolicy.text.token_text import token_pieces
from storage.catalog.catalog import Artifact, Catalog, RunRecorder
from storage.home import Home
from storage.tables.parquet import read_rows, write_rows
from storage.token_ranks import StoredContext, StoredRanking, digest_of, write_token_ranks
from storage.token_ranks import is_whole as has_whole_ranks
from tasks.framework.progress import progress
from tasks.framework.references import ContenderRef, ModelRef, PromptsRef, ShardRef, TrainedRef
from tasks.framework.stage import Stage, StageOutcome, run_together, stage_task
from tasks.framework.wholeness import are_readable, check_files, declare_kind
from tasks.inputs.loaded_model import load_model
from tasks.inputs.samples import read_encoded, read_samples, sample_row
from tasks.inputs.trained import method_parameters

SCORES, COSTS = "scores.parquet", "costs.parquet"


def _is_whole_shard(folder: Path, digest: str) -> bool:
    return are_readable(SCORES, COSTS)(folder, digest) and has_whole_ranks(folder)


declare_kind("evaluation_shard", check_files(_is_whole_shard))


@dataclass(frozen=True, kw_only=True)
class ExampleGroup:
    """Consecutive examples of a set, and who is evaluated on them.

    Attributes:
        model: The model.
        prompts: The set.
        contenders: Who is evaluated.
        config: At which budgets, in which settings, and what is measured; its methods do not matter here.
        first: Place of the first example in the set.
        stop: Place after the last one.
        seed: Of the evaluation.
    """

    model: ModelRef
    prompts: PromptsRef
    contenders: tuple[ContenderRef, ...]
    config: EvaluateConfig
    first: int
    stop: int
    seed: int

    def sample_seed(self, sample: Sample) -> int:
        """Seed of one example."""
        return derive_seed(self.seed, sample.sample_id)

    def only(self, places: Iterable[int]) -> "ExampleGroup":
        """The same examples for some of the contenders."""
        return replace(self, contenders=tuple(self.contenders[place] for place in places))

    def name(self, contender: ContenderRef) -> str:
        """What figures of a contender on these examples are of, for people."""
        return f"{contender.label} on examples {self.first} to {self.stop - 1} of {self.prompts.artifact_id}"


@stage_task("evaluate-shard")
def evaluate_shard(home: Home, group: ExampleGroup) -> list[ShardRef]:
    """Evaluate contenders on some examples at every budget; each contender is a run, and a shard of figures.

    Those whose shards are not there share the prefill of each example, and nothing else: what a contender comes to does
    not depend on the others.
    """
    config = group.config
    parameters = {name: getattr(config, name) for name in _MEASURED}
    stages = contender_stages("evaluate-shard", __name__, group, parameters)

    def body(runs: Mapping[int, RunRecorder]) -> None:
        missing = group.only(runs)
        examples = read_encoded(group.prompts, group.model, slice(group.first, group.stop))
        results = _evaluate(missing, examples)
        for contender, run in zip(missing.contenders, runs.values(), strict=True):
            content = _ShardContent(group, contender, list(zip(examples, results[contender], strict=True)))
            run.output("shard", content.write(home.evaluations / "shards", group.name(contender)))
            if content.describes_examples:
                pairs = [(example, setting) for example in examples for setting in config.settings]
                run.append("samples", [sample_row(*pair, group.prompts, group.model) for pair in pairs])

    outcomes = run_together(home, stages, body, note_skip=False)
    return shard_refs(home, group, outcomes, prefix="shard")


_MEASURED = ("num_generated", "max_answer_tokens", "num_ranked", "chunk_tokens")


def contender_stages(name: str, module: str, group: ExampleGroup, parameters: Mapping[str, Any]) -> list[Stage]:
    """The stage of each contender that makes its figures: it depends on no other contender."""
    model, prompts, config = group.model, group.prompts, group.config
    return [
        Stage(
            name=name,
            module=module,
            inputs={
                "model": model.artifact_id,
                "prompts": prompts.artifact_id,
                **({contender.trained.role: contender.trained.artifact_id} if contender.trained else {}),
            },
            parameters={
                **parameters,
                "method": contender.method,
                "method_seed": contender.seed,
                "budgets": list(config.budgets),
                "settings": list(config.settings),
                "dtype": model.dtype,
                "first": group.first,
                "stop": group.stop,
            },
            choices=chosen([contender.method], prompts.benchmarks),
            seed=group.seed,
        )
        for contender in group.contenders
    ]


def shard_refs(home: Home, group: ExampleGroup, outcomes: Sequence[StageOutcome], *, prefix: str) -> list[ShardRef]:
    """The shards that the contenders' stages made."""
    artifacts = Catalog(home).artifacts([outcome.outputs["shard"] for outcome in outcomes])
    return [
        ShardRef(
            artifact_id=artifact.artifact_id,
            path=artifact.uri,
            role=f"{prefix}_{group.first:04d} {contender.label}",
        )
        for contender, artifact in zip(group.contenders, artifacts, strict=True)
    ]


def contender_refs(config: EvaluateConfig, trained: Sequence[TrainedRef]) -> tuple[ContenderRef, ...]:
    """Every method of an evaluation with every seed that it takes part with."""
    refs: list[ContenderRef] = []
    for name in config.contenders:
        kind = method_type(name).trained
        if kind:
            refs += [ContenderRef(method=name, seed=ref.seed, trained=ref) for ref in trained if ref.kind == kind]
        else:
            num_seeds = config.num_random_seeds if name == "random" else 1
            refs += [ContenderRef(method=name, seed=seed) for seed in range(num_seeds)]
    return tuple(refs)


def make_contenders(group: ExampleGroup, device: str) -> list[Contender]:
    """Load what contenders are made from, and make their methods."""
    trained = dict.fromkeys(ref.trained for ref in group.contenders if ref.trained is not None)
    parameters = {reference: method_parameters(reference, group.model, device) for reference in trained}
    return [
        Contender(method=make_method(ref.method, **(parameters[ref.trained] if ref.trained else {})), seed=ref.seed)
        for ref in group.contenders
    ]


def chosen(methods: Sequence[str], benchmarks: Sequence[str]) -> tuple[Choice, ...]:
    """The methods that are evaluated, and the benchmarks that say what is measured."""
    return (*METHODS.choices(methods), *BENCHMARKS.choices(benchmarks))


def read_scores(shards: Sequence[ShardRef]) -> list[ExampleScore]:
    """Scores of all examples of some shards."""
    return [ExampleScore(**row) for shard in shards for row in read_rows(Path(shard.path) / SCORES)]


def read_costs(shards: Sequence[ShardRef]) -> list[dict[str, Any]]:
    """What rankings cost each head: a row for every example, setting and contender."""
    return [row for shard in shards for row in read_rows(Path(shard.path) / COSTS)]


def _evaluate(group: ExampleGroup, examples: Sequence[EncodedSample]) -> dict[ContenderRef, list[ExampleResult]]:
    """The results of each contender on all examples."""
    model, config = load_model(group.model), group.config
    num_ranked = 0 if config.chunk_tokens else config.num_ranked
    tasks = [sample.task for sample in read_samples(group.prompts)]
    places = [tasks[:index].count(tasks[index]) for index in range(group.first, group.stop)]  # among those of its task
    contenders = make_contenders(group, str(model.device))
    results: dict[ContenderRef, list[ExampleResult]] = {ref: [] for ref in group.contenders}
    by_name = {(ref.method, ref.seed): kept for ref, kept in results.items()}
    with progress("evaluate", len(examples) * len(contenders), "examples x methods") as advance:
        for contender, evaluated in evaluate_examples(
            model,
            [
                EvaluatedExample(
                    encoded=example,
                    seed=group.sample_seed(example.sample),
                    generate=place < config.num_generated,
                    keep_rankings=place < num_ranked,
                )
                for example, place in zip(examples, places, strict=True)
            ],
            contenders,
            config.budgets,
            settings=config.settings,
            max_answer_tokens=config.max_answer_tokens,
            chunk_tokens=config.chunk_tokens,
        ):
            by_name[contender.method.name, contender.seed] += evaluated
            advance(contender.method.name, len(evaluated))
    return results


class _ShardContent:
    """The results of one contender on some examples, as files keep them."""

    def __init__(
        self, group: ExampleGroup, contender: ContenderRef, results: Sequence[tuple[EncodedSample, ExampleResult]]
    ) -> None:
        # What is of no contender is kept with true importance, by which this one ranks.
        self.describes_examples = method_type(contender.method).needs_importance
        self.scores = [score_row(example.sample, score) for example, result in results for score in result.scores]
        self.costs = [_cost_row(example.sample, costs) for example, result in results for costs in result.head_costs]
        ranked = [(example, ranking) for example, result in results for ranking in result.rankings]
        self.rankings = [_stored_ranking(example.sample, ranking) for example, ranking in ranked]
        tokenizer = load_model(group.model).tokenizer
        self.contexts = [
            _stored_context(example, ranking, group.config.budgets, tokenizer)
            for example, ranking in ranked
            if self.describes_examples
        ]

    def write(self, shards: Path, name: str) -> Artifact:
        """Write the files under the digest of what is in them."""
        digest = digest_json([self.scores, self.costs, digest_of(self.contexts, self.rankings)])
        folder = shards / digest[:16]
        write_rows(folder / SCORES, self.scores)
        write_rows(folder / COSTS, self.costs)
        write_token_ranks(folder, self.contexts, self.rankings)
        counts = {"num_contexts": len(self.contexts), "num_rankings": len(self.rankings)}
        return Artifact(kind="evaluation_shard", digest=digest, name=name, uri=str(folder), metadata=counts)


def score_row(sample: Sample, score: Score) -> dict[str, Any]:
    """A score with the sample that it is of."""
    of_sample = {"sample_id": sample.sample_id, "benchmark": sample.benchmark, "task": sample.task}
    return of_sample | asdict(score)


def _stored_context(
    example: EncodedSample, ranking: TokenRanking, budgets: Sequence[int], tokenizer: Any
) -> StoredContext:
    sample, num_context = example.sample, cut_sample(example, ranking.setting).num_context
    return StoredContext(
        sample_id=sample.sample_id,
        benchmark=sample.benchmark,
        task=sample.task,
        setting=ranking.setting,
        budgets=tuple(budgets),
        pieces=tuple(token_pieces((*example.context_ids, *example.question_ids)[:num_context], tokenizer)),
        importance=ranking.importance.float().numpy(),
    )


def _stored_ranking(sample: Sample, ranking: TokenRanking) -> StoredRanking:
    return StoredRanking(
        sample_id=sample.sample_id,
        setting=ranking.setting,
        method=ranking.method,
        seed=ranking.seed,
        ranks=ranking.ranks.numpy().astype(np.int32),
        kept=ranking.kept.numpy().astype(np.int32),
    )


def _cost_row(sample: Sample, ranked: HeadCosts) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "benchmark": sample.benchmark,
        "setting": ranked.setting,
        "method": ranked.method,
        "seed": ranked.seed,
        "costs": torch.as_tensor(ranked.costs).tolist(),
    }
