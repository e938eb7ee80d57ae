"""Prompts: generating the samples of a split, once."""

import dataclasses
from collections.abc import Mapping

from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from storage.catalog import Artifact, Catalog, RunRecorder
from storage.digests import digest_json
from storage.home import Home
from storage.parquet import write_rows
from tasks.model import load_model
from tasks.progress import LOGGER
from tasks.references import ModelRef, PromptsRef
from tasks.stage import Stage, run_stage, stage_task


def prompts_stage(
    model: ModelRef,
    config: PromptConfig,
    *,
    texts: Mapping[str, str],
    split: str,
    num_samples_per_task: int,
    seed: int,
) -> Stage:
    """The stage of one split's prompts; `texts` are the digests of the outside files that the configuration names."""
    parameters = {
        "prompts": dataclasses.asdict(config),
        "texts": dict(texts),
        "split": split,
        "num_samples_per_task": num_samples_per_task,
    }
    return Stage(name="prompts", module=__name__, inputs={"model": model.artifact_id}, parameters=parameters, seed=seed)


@stage_task("write-prompts")
def write_prompts(
    home: Home, model: ModelRef, config: PromptConfig, *, split: str, num_samples_per_task: int, seed: int
) -> PromptsRef:
    """Generate the prompts of a split; their lengths are counted in the model's tokens.

    Raises:
        InputError: If a task does not fit in the length, or a file that it needs is missing, broken or too small.
    """
    stage = prompts_stage(
        model,
        config,
        texts=config.find_files().digests(),
        split=split,
        num_samples_per_task=num_samples_per_task,
        seed=seed,
    )

    def body(run: RunRecorder) -> None:
        made = generate_samples(
            config,
            split=split,
            num_samples_per_task=num_samples_per_task,
            seed=seed,
            tokenizer=load_model(model).tokenizer,
        )
        samples = made.samples
        if made.reported:
            told = "; ".join(f"{reason}: {count}" for reason, count in made.reported.items())
            LOGGER.info("%s prompts, not taken or not as asked for: %s", split, told)
        digest = digest_json([sample.digest() for sample in samples])
        path = home.prompts / f"{digest[:16]}.parquet"
        write_rows(path, [dataclasses.asdict(sample) for sample in samples])
        metadata = {"split": split, "num_samples": len(samples), "reported": dict(made.reported)}
        name = f"{'+'.join(config.benchmarks)} {split}, {len(samples)} samples of up to {config.length_tokens} tokens"
        run.output("prompts", Artifact(kind="prompts", digest=digest, name=name, uri=str(path), metadata=metadata))

    outcome = run_stage(home, stage, body, note_skip=False)
    return prompts_ref(home, outcome.outputs["prompts"], seed=seed)


def prompts_ref(home: Home, artifact_id: str, *, seed: int) -> PromptsRef:
    """The reference of a prompt set in the catalog, given the seed that it was generated with."""
    artifact = Catalog(home).artifact(artifact_id)
    return PromptsRef(
        artifact_id=artifact_id,
        split=str(artifact.metadata["split"]),
        seed=seed,
        num_samples=int(artifact.metadata["num_samples"]),
        path=artifact.uri,
    )
