"""Prompts: generating the samples of a split once, and reading them again."""

import dataclasses
from pathlib import Path
from typing import Any

from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from kvpolicy.benchmarks.sample import Sample
from kvpolicy.prompts import EncodedSample, encode
from kvpolicy.protocol import cut_sample
from storage.catalog import Artifact, Catalog, RunRecorder
from storage.digests import digest_json
from storage.home import Home
from storage.parquet import read_rows, write_rows
from tasks.model import load_model
from tasks.references import ModelRef, PromptsRef
from tasks.stage import Stage, run_stage, stage_task


@stage_task("write-prompts")
def write_prompts(
    home: Home, model: ModelRef, config: PromptConfig, *, split: str, num_samples_per_task: int, seed: int
) -> PromptsRef:
    """Generate the prompts of a split; their lengths are counted in the model's tokens.

    Raises:
        InputError: If a task does not fit in the length, or a text that it needs is missing.
    """
    parameters = {
        "prompts": dataclasses.asdict(config),
        "texts": dict(config.read_texts().digests),
        "split": split,
        "num_samples_per_task": num_samples_per_task,
    }
    stage = Stage(
        name="prompts", module=__name__, inputs={"model": model.artifact_id}, parameters=parameters, seed=seed
    )

    def body(run: RunRecorder) -> None:
        samples = generate_samples(
            config,
            split=split,
            num_samples_per_task=num_samples_per_task,
            seed=seed,
            tokenizer=load_model(model).tokenizer,
        )
        digest = digest_json([sample.digest() for sample in samples])
        path = home.prompts / f"{digest[:16]}.parquet"
        write_rows(path, [dataclasses.asdict(sample) for sample in samples])
        metadata = {"split": split, "num_samples": len(samples)}
        name = f"{config.benchmark} {split}, {len(samples)} samples of up to {config.length_tokens} tokens"
        run.output("prompts", Artifact(kind="prompts", digest=digest, name=name, uri=str(path), metadata=metadata))

    outcome = run_stage(home, stage, body, note_skip=False)
    artifact = Catalog(home).artifact(outcome.outputs["prompts"])
    return PromptsRef(
        artifact_id=artifact.artifact_id,
        split=split,
        seed=seed,
        num_samples=int(artifact.metadata["num_samples"]),
        path=artifact.uri,
    )


def read_samples(prompts: PromptsRef) -> list[Sample]:
    """Read the samples of a set, in its order."""
    return [_sample(row) for row in read_rows(Path(prompts.path))]


def read_encoded(prompts: PromptsRef, model: ModelRef) -> list[EncodedSample]:
    """Read the samples of a set as token ids of a model."""
    tokenizer = load_model(model).tokenizer
    return [encode(sample, tokenizer) for sample in read_samples(prompts)]


def sample_row(
    example: EncodedSample, setting: str, prompts: PromptsRef, model: ModelRef, collection: str = ""
) -> dict[str, Any]:
    """Row of the catalog's table `samples`; the collection is that of its traces, if they are kept."""
    sample = example.sample
    cut = cut_sample(example, setting)
    return {
        "sample_id": sample.sample_id,
        "benchmark": sample.benchmark,
        "task": sample.task,
        "split": sample.split,
        "setting": setting,
        "seed": prompts.seed,
        "prompt_digest": sample.digest(),
        "context_tokens": cut.num_context,
        "question_tokens": len(example.question_ids),
        "answer_tokens": cut.num_answer,
        "collection": collection,
        "model_digest": model.digest,
    }


def _sample(row: dict[str, Any]) -> Sample:
    return Sample(**{**row, "references": tuple(row["references"])})
