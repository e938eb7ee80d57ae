"""Finding the model that a pipeline is about, and registering it.

What `kvpolicy.models.reference` finds is found there. A version in MLflow's registry is first made a model folder in
the cache of models, and then it is one.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from kvpolicy.config.specs import ModelSpec
from kvpolicy.errors import InputError
from kvpolicy.models.folder_check import require_loadable_folder
from kvpolicy.models.model_folder import TEMPLATES, is_content, new_model_folder
from kvpolicy.models.reference import ModelReference, default_cache, find_model, resolve_model
from kvpolicy.models.registered import RegisteredName, is_registered, model_parts, registered_place
from storage.catalog.catalog import Artifact, Catalog
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.registered_models import ModelVersion, RegisteredModels
from tasks.framework.references import ModelRef
from tasks.framework.stage import stage_task
from tasks.inputs.loaded_model import load_folder


@stage_task("register-model")
def register_model(home: Home, source: str, dtype: str) -> ModelRef:
    """Find, fetch or convert a model and note it in the catalog.

    Raises:
        InputError: If there is no such model, or it is not supported.
        StorageError: If MLflow's registry has no such version, or cannot be reached.
    """
    resolved = resolve(home, source)
    model = load_folder(str(resolved.folder), dtype)
    catalog = Catalog(home)
    artifact = Artifact(
        kind="model",
        digest=resolved.digest,
        name=resolved.name,
        uri=resolved.folder.as_uri(),
        metadata={"source": resolved.source, "revision": resolved.revision},
    )
    artifact_id = catalog.register(artifact)
    spec = model.spec
    catalog.append(
        "models",
        [
            {
                "model_id": artifact_id,
                "name": resolved.name,
                "source": resolved.source,
                "revision": resolved.revision,
                "digest": resolved.digest,
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
        digest=resolved.digest,
        name=resolved.name,
        folder=str(resolved.folder),
        dtype=dtype,
        num_heads=spec.num_heads,
    )


def resolve(home: Home, source: str) -> ModelReference:
    """Find, fetch or convert a model: as `resolve_model`, and from the home's registry.

    Args:
        home: The home.
        source: What `resolve_model` takes, or `models:/NAME/VERSION` or `models:/NAME@ALIAS`.

    Raises:
        InputError: If there is no such model, it cannot be fetched, it is no language model, or its files are damaged.
        StorageError: If MLflow's registry has no such version, or cannot be reached.
    """
    if not is_registered(source):
        return resolve_model(source)
    version = _version(home, source)
    folder = registered_place(version.name, version.identity, default_cache())
    if not folder.exists():
        _fetch(home, version, folder)
    return _in_cache(version, folder)


def find(home: Home, source: str) -> ModelReference | None:
    """Find what `resolve` would, as far as it lies here: nothing is fetched or converted.

    Returns:
        None for a model that would have to be fetched or converted first.

    Raises:
        InputError: If there is no such model, or its files are damaged.
        StorageError: If MLflow's registry has no such version, or cannot be asked.
    """
    if not is_registered(source):
        return find_model(source)
    version = _version(home, source)
    folder = registered_place(version.name, version.identity, default_cache())
    return _in_cache(version, folder) if folder.exists() else None


def _version(home: Home, reference: str) -> ModelVersion:
    asked = RegisteredName.of_reference(reference)
    return RegisteredModels(home).find(asked.name, number=asked.number, alias=asked.alias)


def _fetch(home: Home, version: ModelVersion, folder: Path) -> None:
    """Put the files of a version that are a model into one folder, refusing code before weights are fetched."""
    registry = RegisteredModels(home)
    files = registry.names(version)
    flavors = registry.flavors(version) if "MLmodel" in files else {}
    parts = model_parts(version.reference, files, flavors)
    wanted: dict[str, str] = {}
    for part in parts:
        there = {path[len(part) :].lstrip("/"): path for path in registry.names(version, part)}
        if TEMPLATES in there:
            inner = registry.names(version, there[TEMPLATES])
            there |= {f"{TEMPLATES}/{Path(path).name}": path for path in inner}
        wanted |= {name: path for name, path in there.items() if is_content(name)}
    with new_model_folder(folder) as draft:

        def fetch(names: Iterable[str]) -> None:
            for name in names:
                (draft / name).parent.mkdir(exist_ok=True)
                registry.fetch(version, wanted[name], draft / name)

        fetch(name for name in wanted if name.endswith(".json"))
        try:
            require_loadable_folder(draft)
        except InputError as error:
            raise InputError(f"model {version.reference}: {error}") from error
        fetch(name for name in wanted if not name.endswith(".json"))


def _in_cache(version: ModelVersion, folder: Path) -> ModelReference:
    resolved = resolve_model(str(folder))
    return dataclasses.replace(
        resolved, name=version.name, source=version.reference, revision=version.identity, folder=folder
    )


def recorded_model(home: Home, artifact_id: str, *, dtype: str, source: str) -> ModelRef:
    """A model of the catalog as it was recorded, found where it lay then or where `source` is now; nothing is fetched.

    Raises:
        InputError: If it is in neither place, or no longer what it was.
    """
    artifact = Catalog(home).artifact(artifact_id)
    folder = url2pathname(urlsplit(artifact.uri).path)
    for place in (folder, source):
        candidate = _found(home, place)
        if candidate is not None and candidate.digest == artifact.digest:
            reference = ModelRef(
                artifact_id=artifact_id,
                digest=candidate.digest,
                name=artifact.name,
                folder=str(candidate.folder),
                dtype=dtype,
                num_heads=0,
            )
            return dataclasses.replace(reference, num_heads=model_spec(home, reference).num_heads)
    raise InputError(
        f"model {artifact.name} at {folder} is lost, or no longer what was recorded (SHA-256 {artifact.digest[:12]}): "
        "put that model back there, then repeat the run"
    )


def _found(home: Home, source: str) -> ModelReference | None:
    try:
        return find(home, source)
    except (InputError, StorageError):
        return None


def model_spec(home: Home, reference: ModelRef) -> ModelSpec:
    """Shape of a registered model, without loading it."""
    row = Catalog(home).rows("models", f"model_id = '{reference.artifact_id}'")[0]
    return ModelSpec(**{field.name: row[field.name] for field in dataclasses.fields(ModelSpec)})
