"""Analysing: what the reward is worth on some of the evaluated examples, a shard of figures for each contender.

In float32 whatever the type in which the model is evaluated, as the harm of a single token can be as small as the
rounding of bfloat16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvpolicy.digests import digest_json
from kvpolicy.evaluation import AnalysisResult, Finding, analyse_example
from kvpolicy.text.sample import Sample
from storage.catalog.catalog import Artifact, RunRecorder
from storage.home import Home
from storage.tables.parquet import read_rows, write_rows
from tasks.evaluate import SCORES, ExampleGroup, contender_stages, make_contenders, score_row, shard_refs
from tasks.framework.progress import progress
from tasks.framework.references import ContenderRef, ShardRef
from tasks.framework.stage import run_together, stage_task
from tasks.framework.wholeness import are_readable, check_files, declare_kind
from tasks.inputs.loaded_model import load_model
from tasks.inputs.samples import read_encoded

FINDINGS = "findings.parquet"

declare_kind("analysis_shard", check_files(are_readable(SCORES, FINDINGS)))


@stage_task("analyse-shard")
def analyse_shard(home: Home, group: ExampleGroup) -> list[ShardRef]:
    """Analyse contenders on some examples; each contender is a run, and a shard of figures."""
    exact = replace(group, model=replace(group.model, dtype="float32"))
    stages = contender_stages("analyse-shard", __name__, exact, {})

    def body(runs: Mapping[int, RunRecorder]) -> None:
        missing = exact.only(runs)
        results = list(_analyse_examples(missing))
        for contender, run in zip(missing.contenders, runs.values(), strict=True):
            scores = [score_row(sample, score) for sample, result in results for score in result.scores]
            findings = [_finding_row(sample, finding) for sample, result in results for finding in result.findings]
            scores, findings = _of_contender(scores, contender), _of_contender(findings, contender)
            digest = digest_json([scores, findings])
            folder = home.evaluations / "analyses" / digest[:16]
            write_rows(folder / SCORES, scores)
            write_rows(folder / FINDINGS, findings)
            name = f"analysis of {group.name(contender)}"
            run.output("shard", Artifact(kind="analysis_shard", digest=digest, name=name, uri=str(folder)))

    outcomes = run_together(home, stages, body, note_skip=False)
    return shard_refs(home, exact, outcomes, prefix="analysis")


def _analyse_examples(group: ExampleGroup) -> Iterator[tuple[Sample, AnalysisResult]]:
    model = load_model(group.model)
    contenders = make_contenders(group, str(model.device))
    examples = read_encoded(group.prompts, group.model, slice(group.first, group.stop))
    with progress("analyse", len(examples), "examples") as advance:
        for example in examples:
            result = analyse_example(
                model,
                example,
                contenders,
                group.config.budgets,
                settings=group.config.settings,
                sample_seed=group.sample_seed(example.sample),
            )
            yield example.sample, result
            advance(example.sample.task)


def _finding_row(sample: Sample, finding: Finding) -> dict[str, Any]:
    of_sample = {"sample_id": sample.sample_id, "benchmark": sample.benchmark, "task": sample.task}
    return of_sample | asdict(finding)


def _of_contender(rows: Sequence[dict[str, Any]], contender: ContenderRef) -> list[dict[str, Any]]:
    return [row for row in rows if (row["method"], row["seed"]) == (contender.method, contender.seed)]


def read_findings(shards: Sequence[ShardRef]) -> list[dict[str, Any]]:
    """Findings of all analysed examples of some shards."""
    return [row for shard in shards for row in read_rows(Path(shard.path) / FINDINGS)]
