"""Planning: what all stages of a run share, found or made before anything that takes time."""

from collections.abc import Iterator
from contextlib import contextmanager

from flows.request import Request
from flows.runners.engagement import engaged
from flows.runtime.process import open_home, prepare_process
from flows.runtime.run_options import Choices, Runner
from flows.stages import run_all
from kvpolicy.errors import InputError
from kvpolicy.names import SPLITS
from kvpolicy.seeds import MAX_SEED
from kvpolicy.text.chat_format import rendered_formats
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.mlflow.deletions import require_experiment
from tasks.checks import check_prompts
from tasks.framework.purpose import Purpose, acting_for
from tasks.framework.stage import note_loaded_code
from tasks.framework.work import Plan
from tasks.inputs.loaded_model import load_model
from tasks.model import register_model
from tasks.prompts import PromptsWork


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
    config = request.config
    with engaged(runner):
        opened = open_home(home)
        note_loaded_code()
        prepare_process()
        reference = register_model(opened, model, config.dtype)
        require_experiment(opened, reference.name)
        with serving(opened, request):
            plan = Plan(
                home=opened,
                config=config,
                seed=seed,
                model=reference,
                texts=config.prompts.find_files().digests(),
                formats=dict.fromkeys(SPLITS, rendered_formats(load_model(reference).tokenizer)),
            )
            prompts = [written for written, _ in run_all(PromptsWork, plan)]
            check_prompts(reference, prompts, config)
            yield plan


@contextmanager
def serving(home: Home, request: Request) -> Iterator[None]:
    """Note a request; whatever the block runs is recorded as run for it."""
    with acting_for(Purpose(request_id=Catalog(home).register(request.to_artifact()))):
        yield
