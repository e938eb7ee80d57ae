"""A home and a tiny model, registered; tasks are called through `.fn()`, without an orchestrator."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpolicy.benchmarks.prompt_set import PromptConfig
from kvpolicy.text.chat_format import rendered_formats
from storage.home import Home
from tasks.framework.references import ModelRef, PromptsRef
from tasks.inputs.loaded_model import load_model
from tasks.model import register_model
from tasks.prompts import write_prompts

PROMPTS = PromptConfig(tasks=("niah_single_1", "vt"), length_tokens=1200)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home.open(tmp_path_factory.mktemp("tasks") / "home")


@pytest.fixture(scope="module")
def model_folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama", num_hidden_layers=2, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def model(home: Home, model_folder: Path) -> ModelRef:
    return register_model.fn(home, str(model_folder), "float32")


@pytest.fixture(scope="module")
def prompts(home: Home, model: ModelRef) -> Callable[..., PromptsRef]:
    """Writes the prompts of a split: `prompts("train", 2)`."""

    def write(split: str, num_samples_per_task: int = 1, *, seed: int = 0) -> PromptsRef:
        return write_prompts.fn(
            home,
            model,
            PROMPTS,
            texts={},
            formats=rendered_formats(load_model(model).tokenizer),
            split=split,
            num_samples_per_task=num_samples_per_task,
            seed=seed,
        )[0]

    return write
