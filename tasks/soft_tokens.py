"""Training the soft tokens of the method `judgeq`, on the prompts that policies are trained on."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from kvpolicy.training.soft_token_training import SoftTokenConfig, make_lesson, train_soft_tokens
from storage.catalog.catalog import RunRecorder
from storage.home import Home
from tasks.framework.progress import progress
from tasks.framework.references import ModelRef, PromptsRef, TrainedRef, prompts_ref, trained_ref
from tasks.framework.stage import Stage, StageOutcome, run_stage, stage_task
from tasks.framework.work import Plan, Record, Work
from tasks.inputs.loaded_model import load_model
from tasks.inputs.samples import read_encoded
from tasks.inputs.trained import save_trained


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


@dataclass(frozen=True, kw_only=True)
class SoftTokenWork(Work):
    """The soft tokens of one seed: a single part."""

    name: ClassVar[str] = "train-soft-tokens"
    title: ClassVar[str] = "train soft tokens"
    result: ClassVar[str] = "soft_tokens"
    one_per: ClassVar[str] = "seed"
    refer = staticmethod(trained_ref)

    home: Home
    model: ModelRef
    prompts: PromptsRef
    config: SoftTokenConfig
    setting: str
    seed: int

    @property
    def stage(self) -> Stage:
        """The stage."""
        return soft_tokens_stage(self.model, self.prompts, self.config, setting=self.setting, seed=self.seed)

    @classmethod
    def planned(cls, plan: Plan) -> Iterator[Self]:
        """One a seed, if some method is made from them."""
        prompts: Any = plan.made.get(("prompts", "train"))
        for seed in plan.policy_seeds if prompts and "soft_tokens" in plan.config.evaluate.trained_kinds else ():
            yield cls(
                home=plan.home,
                model=plan.model,
                prompts=prompts,
                config=plan.config.soft_tokens,
                setting=plan.config.collect.setting,
                seed=seed,
            )

    @classmethod
    def recorded(cls, record: Record) -> Self:
        """The recorded training."""
        return cls(
            home=record.home,
            model=record.model(),
            prompts=prompts_ref(record.home, record.artifact("prompts").artifact_id, seed=record.seed),
            config=record.config.soft_tokens,
            setting=record.parameters["setting"],
            seed=record.own_seed,
        )

    def parts(self) -> "list[partial[Any]]":
        """The training."""
        given = (self.home, self.model, self.prompts, self.config)
        return [partial(train_judge, *given, setting=self.setting, seed=self.seed)]

    def finish(self, made: Sequence[tuple[TrainedRef, StageOutcome]]) -> tuple[TrainedRef, StageOutcome]:
        """Return what the one part has made, or find it again."""
        (outcome,) = made or [part() for part in self.parts()]
        return outcome
