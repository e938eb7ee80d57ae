"""Registering the model that a pipeline is about, and loading it where a task needs it."""

import dataclasses
import functools
from pathlib import Path

from kvpolicy.models.language_model import LanguageModel, load_language_model
from kvpolicy.models.reference import resolve_model
from kvpolicy.specs import ModelSpec
from storage.catalog import Artifact, Catalog
from storage.home import Home
from tasks.references import ModelRef
from tasks.stage import stage_task


@stage_task("register-model")
def register_model(home: Home, source: str, dtype: str) -> ModelRef:
    """Find, fetch or convert a model and note it in the catalog.

    Raises:
        InputError: If there is no such model, or it is not supported.
    """
    found = resolve_model(source)
    model = _load(str(found.folder), dtype)
    catalog = Catalog(home)
    artifact = Artifact(
        kind="model",
        digest=found.digest,
        name=found.name,
        uri=found.folder.as_uri(),
        metadata={"source": found.source, "revision": found.revision},
    )
    artifact_id = catalog.register(artifact)
    spec = model.spec
    catalog.append(
        "models",
        [
            {
                "model_id": artifact_id,
                "name": found.name,
                "source": found.source,
                "revision": found.revision,
                "digest": found.digest,
                "architecture": type(model.network).__name__,
                "num_layers": spec.num_layers,
                "num_query_heads": spec.num_query_heads,
                "num_kv_heads": spec.num_kv_heads,
                "head_dim": spec.head_dim,
                "max_positions": spec.max_positions,
            }
        ],
    )
    return ModelRef(
        artifact_id=artifact_id,
        digest=found.digest,
        name=found.name,
        folder=str(found.folder),
        dtype=dtype,
        num_heads=spec.num_heads,
    )


def model_spec(home: Home, reference: ModelRef) -> ModelSpec:
    """Shape of a registered model, without loading it."""
    row = Catalog(home).rows("models", f"model_id = '{reference.artifact_id}'")[0]
    return ModelSpec(**{field.name: row[field.name] for field in dataclasses.fields(ModelSpec)})


def load_model(reference: ModelRef) -> LanguageModel:
    """The model itself; a process loads it once."""
    return _load(reference.folder, reference.dtype)


@functools.lru_cache(maxsize=1)
def _load(folder: str, dtype: str) -> LanguageModel:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_language_model(Path(folder), dtype=dtype, device=device)
