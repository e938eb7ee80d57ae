"""A model by what a user calls it, loaded and with the digest by which policies know it."""

import dataclasses

import torch

from kvpolicy.models.language_model import LanguageModel, load_language_model
from kvpolicy.models.reference import EMBEDDED, ModelReference, resolve_model


def load_model(
    source: str | ModelReference = EMBEDDED, *, dtype: str = "bfloat16", device: str | None = None
) -> LanguageModel:
    """Find, fetch or convert a model, and load it.

    Args:
        source: `embedded`, a folder, a `.gguf` file, a hub id (`owner/name` or `owner/name@revision`), or a model that
            was found before.
        dtype: `bfloat16`, `float16` or `float32`.
        device: Where to run it; by default an accelerator of CUDA's if there is one, else the processor.

    Raises:
        InputError: If there is no such model, its files are damaged, or it cannot be loaded or is not supported.
    """
    found = resolve_model(source) if isinstance(source, str) else source
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_language_model(found.folder, dtype=dtype, device=where)
    return dataclasses.replace(model, digest=found.digest)
