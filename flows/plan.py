"""Preparing: what all stages of a run share, found or made before anything that takes time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flows.options import Choices, Runner
from flows.process import open_home, prepare_process
from flows.request import Request
from flows.runners.engagement import engaged
from kvpolicy.errors import InputError
from kvpolicy.pipeline import PipelineConfig
from kvpolicy.seeds import MAX_SEED
from storage.catalog import Catalog
from storage.home import Home
from storage.mlflow_tables import require_experiment
from tasks.checks import check_prompts
from tasks.collect import collection_stage
from tasks.model import register_model
from tasks.prompts import write_prompts
from tasks.purpose import Purpose, acting_for
from tasks.references import ModelRef, PromptsRef, SnapshotRef
from tasks.soft_tokens import soft_tokens_stage
from tasks.stage import Stage, note_loaded_code
from tasks.train import training_stage


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
    def policy_seeds(self) -> range:
        """Seed of each policy set that is trained: the run's own, and those after it."""
        return policy_seeds(self.config, self.seed)

    def needs(self, trained: str) -> bool:
        """Whether some method that is judged is made from it: `policy_set` or `soft_tokens`."""
        return self.config.evaluate.needs(trained)

    def trainings(self, snapshot: SnapshotRef) -> list[Stage]:
        """The stage of each policy set."""
        return [training_stage(self.model, snapshot, self.config.train, seed=own) for own in self.policy_seeds]

    @property
    def soft_token_trainings(self) -> list[Stage]:
        """The stage of each training of soft tokens."""
        setting, config = self.config.collect.setting, self.config.soft_tokens
        return [
            soft_tokens_stage(self.model, self.train_prompts, config, setting=setting, seed=own)
            for own in self.policy_seeds
        ]

    @property
    def collection(self) -> Stage:
        """The stage of the collection, whose key names its traces."""
        return collection_stage(self.model, (self.train_prompts, self.heldout_prompts), self.config.collect)


def policy_seeds(config: PipelineConfig, seed: int) -> range:
    """Seed of each policy set that takes part."""
    return range(seed, seed + config.evaluate.num_policy_seeds)


@contextmanager
def planned(
    *, preset: str, model: str, home: str | None, seed: int, choices: Choices, runner: Runner
) -> Iterator[Plan]:
    """Note the request and make its plan; whatever the block runs is recorded as run for that request.

    Yields:
        The plan: the home is open, the model registered, the prompts are written, and parts will run on the runner.

    Raises:
        InputError: If the preset, a choice, the model or the runner is wrong, or a budget does not fit in the prompts.
        StorageError: If the home cannot be used, or the model's experiment was deleted in MLflow.
    """
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"seed is {seed}, expected from 0 to {MAX_SEED}")
    request = Request.make(preset=preset, model=model, seed=seed, choices=choices)
    with engaged(runner):
        opened = open_home(home)
        note_loaded_code()
        prepare_process()
        reference = register_model(opened, model, request.config.dtype)
        require_experiment(opened, reference.name)
        with serving(opened, request):
            yield _make_plan(opened, reference, request.config, seed)


@contextmanager
def serving(home: Home, request: Request) -> Iterator[None]:
    """Note a request; whatever the block runs is recorded as run for it."""
    with acting_for(Purpose(request_id=Catalog(home).register(request.to_artifact()))):
        yield


def _make_plan(home: Home, model: ModelRef, config: PipelineConfig, seed: int) -> Plan:
    """Write the prompts, and refuse what cannot work with them."""

    def prompts(split: str) -> PromptsRef:
        about, count = config.prompts_of(split)
        written: PromptsRef = write_prompts(home, model, about, split=split, num_samples_per_task=count, seed=seed)
        return written

    plan = Plan(
        home=home,
        config=config,
        seed=seed,
        model=model,
        train_prompts=prompts("train"),
        heldout_prompts=prompts("validation"),
        test_prompts=prompts("test"),
    )
    check_prompts(model, (plan.train_prompts, plan.heldout_prompts, plan.test_prompts), config)
    return plan
