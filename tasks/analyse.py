"""Analysing: what the reward is worth on some of the judged examples, one task a shard.

In float32 whatever the type in which the model is judged, as the harm of a single token can be as small as the rounding
of bfloat16.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.evaluation import EvaluateConfig, analyse_example
from kvpolicy.seeds import derive_seed
from storage.catalog import Artifact, Catalog, RunRecorder
from storage.digests import digest_json
from storage.home import Home
from storage.parquet import read_rows, write_rows
from tasks.evaluate import SCORES, chosen, judged_inputs, judged_parameters, make_contenders, score_row
from tasks.loaded_model import load_model
from tasks.progress import progress
from tasks.references import ModelRef, PromptsRef, ShardRef, TrainedRef
from tasks.samples import read_encoded
from tasks.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.wholeness import are_readable, check_files, declare_kind

FINDINGS = "findings.parquet"

declare_kind("analysis_shard", check_files(are_readable(SCORES, FINDINGS)))


@stage_task("analyse-shard")
def analyse_shard(
    home: Home,
    model: ModelRef,
    trained: Sequence[TrainedRef],
    prompts: PromptsRef,
    config: EvaluateConfig,
    *,
    examples: tuple[int, int],
    seed: int,
) -> tuple[ShardRef, StageOutcome]:
    """Analyse consecutive examples, from the first up to but without the last of `examples`."""
    exact = dataclasses.replace(model, dtype="float32")
    first, stop = examples
    stage = Stage(
        name="analyse-shard",
        module=__name__,
        inputs=judged_inputs(model, prompts, trained),
        parameters={
            **judged_parameters(config),
            "dtype": exact.dtype,
            "first": first,
            "stop": stop,
        },
        choices=chosen(config, prompts.benchmarks),
        seed=seed,
    )

    def body(run: RunRecorder) -> None:
        scores: list[dict[str, Any]] = []
        findings: list[dict[str, Any]] = []
        language_model = load_model(exact)
        contenders = make_contenders(config, trained, exact, str(language_model.device))
        with progress("analyse", stop - first, "examples") as advance:
            for example in read_encoded(prompts, exact, slice(first, stop)):
                sample = example.sample
                result = analyse_example(
                    language_model,
                    example,
                    contenders,
                    config.budgets,
                    settings=config.settings,
                    sample_seed=derive_seed(seed, sample.sample_id),
                )
                scores += [score_row(sample, score) for score in result.scores]
                of_sample = {"sample_id": sample.sample_id, "benchmark": sample.benchmark, "task": sample.task}
                findings += [of_sample | dataclasses.asdict(finding) for finding in result.findings]
                advance(sample.task)
        digest = digest_json([scores, findings])
        folder = home.evaluations / "analyses" / digest[:16]
        write_rows(folder / SCORES, scores)
        write_rows(folder / FINDINGS, findings)
        name = f"analysis of examples {first} to {stop - 1} of {prompts.artifact_id}"
        run.output("shard", Artifact(kind="analysis_shard", digest=digest, name=name, uri=str(folder)))

    outcome = run_stage(home, stage, body, note_skip=False)
    artifact = Catalog(home).artifact(outcome.outputs["shard"])
    return ShardRef(artifact_id=artifact.artifact_id, path=artifact.uri), outcome


def read_findings(shards: Sequence[ShardRef]) -> list[dict[str, Any]]:
    """Findings of all analysed examples of some shards."""
    return [row for shard in shards for row in read_rows(Path(shard.path) / FINDINGS)]
