"""Training the soft tokens of the method `judgeq`, on the prompts that policies are trained on."""

import dataclasses

from kvpolicy.policies.soft_token_training import SoftTokenConfig, make_lesson, train_soft_tokens
from storage.catalog import RunRecorder
from storage.home import Home
from tasks.loaded_model import load_model
from tasks.progress import progress
from tasks.references import ModelRef, PromptsRef, TrainedRef
from tasks.samples import read_encoded
from tasks.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.trained import save_trained, trained_ref


def soft_tokens_stage(
    model: ModelRef, prompts: PromptsRef, config: SoftTokenConfig, *, setting: str, seed: int
) -> Stage:
    """The stage of a training of soft tokens; `setting` says what of a prompt is context."""
    return Stage(
        name="train-soft-tokens",
        module=__name__,
        inputs={"model": model.artifact_id, "prompts": prompts.artifact_id},
        parameters={"soft_tokens": dataclasses.asdict(config), "setting": setting, "dtype": model.dtype},
        seed=seed,
    )


@stage_task("train-soft-tokens")
def train_judge(
    home: Home, model: ModelRef, prompts: PromptsRef, config: SoftTokenConfig, *, setting: str, seed: int
) -> tuple[TrainedRef, StageOutcome]:
    """Train soft tokens on the first contexts of a set of prompts, which are of all its tasks in turn."""
    stage = soft_tokens_stage(model, prompts, config, setting=setting, seed=seed)

    def body(run: RunRecorder) -> None:
        language_model = load_model(model)
        examples = read_encoded(prompts, model, slice(config.num_contexts))
        lessons = []
        with progress("prepare soft tokens", len(examples), "contexts") as advance:
            for example in examples:
                lessons.append(make_lesson(language_model, example, setting, config))
                advance(example.sample.task)
        with progress("train soft tokens", config.num_steps, "steps") as advance:
            made = train_soft_tokens(
                language_model,
                lessons,
                config,
                seed=seed,
                model_digest=model.digest,
                provenance={"prompts": prompts.artifact_id},
                on_step=lambda step, loss: advance(f"loss {loss:.4f}"),
            )
        artifact = save_trained(home, made, f"{model.name}, soft tokens, seed {seed}", kind="soft_tokens")
        run.output("soft_tokens", dataclasses.replace(artifact, metadata={"seed": seed}))

    outcome = run_stage(home, stage, body)
    return trained_ref(home, outcome.outputs["soft_tokens"]), outcome
