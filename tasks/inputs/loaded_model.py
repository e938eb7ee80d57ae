"""The model that a task runs; a process loads it once."""

import functools
from pathlib import Path

import torch

from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.language_model import LanguageModel
from tasks.framework.references import ModelRef


def load_model(reference: ModelRef) -> LanguageModel:
    """Load a registered model, on an accelerator of CUDA's if there is one.

    Raises:
        InputError: If its files cannot be loaded.
    """
    return load_folder(reference.folder, reference.dtype)


@functools.lru_cache(maxsize=1)
def load_folder(folder: str, dtype: str) -> LanguageModel:
    """Load a model that is not registered yet, as `load_model` does."""
    return load_language_model(Path(folder), dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
