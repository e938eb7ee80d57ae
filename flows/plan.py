"""Preparing: what all stages of a run share, found or made before anything that takes time."""

from dataclasses import dataclass

from flows.options import Choices
from flows.process import home_path, prepare_process
from kvpolicy.errors import InputError
from kvpolicy.pipeline import PipelineConfig
from kvpolicy.seeds import MAX_SEED
from storage.home import Home
from tasks.collect import collection_stage
from tasks.evaluate import check_prompts
from tasks.model import register_model
from tasks.prompts import write_prompts
from tasks.references import ModelRef, PromptsRef
from tasks.stage import Stage, note_loaded_code


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The home, the configuration, the model and the prompts of a run."""

    home: Home
    config: PipelineConfig
    seed: int
    model: ModelRef
    train_prompts: PromptsRef
    heldout_prompts: PromptsRef
    test_prompts: PromptsRef

    @property
    def collection(self) -> Stage:
        """The stage of the collection, whose key names its traces."""
        return collection_stage(self.model, (self.train_prompts, self.heldout_prompts), self.config.collect)


def make_plan(*, preset: str, model: str, home: str | None, seed: int, choices: Choices) -> Plan:
    """Open the home, register the model and write the prompts; refuse what cannot work.

    Raises:
        InputError: If the preset, a choice or the model is wrong, or a budget does not fit in the prompts.
        StorageError: If the home cannot be used.
    """
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed is {seed}, expected from 0 to {MAX_SEED}")
    config = choices.configure(preset)
    opened = Home.open(home_path(home))
    note_loaded_code()
    prepare_process()
    reference = register_model(opened, model, config.dtype)

    def prompts(split: str, num_samples_per_task: int) -> PromptsRef:
        written: PromptsRef = write_prompts(
            opened, reference, config.prompts, split=split, num_samples_per_task=num_samples_per_task, seed=seed
        )
        return written

    plan = Plan(
        home=opened,
        config=config,
        seed=seed,
        model=reference,
        train_prompts=prompts("train", config.collect.num_train_samples),
        heldout_prompts=prompts("validation", config.collect.num_heldout_samples),
        test_prompts=prompts("test", config.evaluate.num_samples),
    )
    check_prompts(reference, (plan.train_prompts, plan.heldout_prompts, plan.test_prompts), config.evaluate)
    return plan
