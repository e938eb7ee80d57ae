"""Registering the model that a pipeline is about, and loading it where a task needs it."""

import dataclasses
import functools
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvpolicy.errors import InputError
from kvpolicy.models.language_model import LanguageModel, load_language_model
from kvpolicy.models.reference import ModelReference, find_model, resolve_model
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


def recorded_model(home: Home, artifact_id: str, *, dtype: str, source: str) -> ModelRef:
    """A model of the catalog as it was recorded, found where it lay then or where `source` is now; nothing is fetched.

    Raises:
        InputError: If it is in neither place, or no longer what it was.
    """
    artifact = Catalog(home).artifact(artifact_id)
    folder = url2pathname(urlsplit(artifact.uri).path)
    for place in (folder, source):
        found = _found(place)
        if found is not None and found.digest == artifact.digest:
            reference = ModelRef(
                artifact_id=artifact_id,
                digest=found.digest,
                name=artifact.name,
                folder=str(found.folder),
                dtype=dtype,
                num_heads=0,
            )
            return dataclasses.replace(reference, num_heads=model_spec(home, reference).num_heads)
    raise InputError(
        f"model {artifact.name} at {folder} is lost, or no longer what was recorded (SHA-256 {artifact.digest[:12]}): "
        "put that model back there, then repeat the run"
    )


def _found(source: str) -> ModelReference | None:
    try:
        return find_model(source)
    except InputError:
        return None


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
