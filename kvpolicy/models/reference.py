"""From what a user calls a model (a folder, a hub id, a GGUF file, nothing) to a local folder with a content digest.

What is in MLflow's registry becomes such a folder first, in `tasks.model`.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpolicy.digests import digest_file
from kvpolicy.errors import InputError, first_line
from kvpolicy.models.convert import convert_gguf, converted_place
from kvpolicy.models.embedded import NAME, WHEEL, embedded_model_folder, embedded_model_place
from kvpolicy.models.folder_check import require_loadable_folder
from kvpolicy.models.model_folder import CONTENT_PATTERNS, check_recorded_digests, content_files
from kvpolicy.models.registered import is_registered

EMBEDDED = "embedded"


@dataclass(frozen=True, kw_only=True)
class ModelReference:
    """A model that lies on this machine.

    Attributes:
        name: For people.
        source: What the user named: `embedded`, a folder, a GGUF file, a hub id or a version in MLflow's registry.
        revision: The hub's commit or the version's identity, or empty.
        folder: Where it lies, in Hugging Face's format.
        digest: SHA-256 over weights, configuration and tokenizer; independent of where they lie. Code in the folder is
            left out, as none of it is ever run.
    """

    name: str
    source: str
    revision: str
    folder: Path
    digest: str


def default_cache() -> Path:
    """Where models are kept: `KVP_CACHE`, or `~/.cache/kvpolicy`."""
    return Path(os.environ.get("KVP_CACHE") or Path.home() / ".cache" / "kvpolicy").expanduser()


def resolve_model(source: str = EMBEDDED, *, cache: Path | None = None) -> ModelReference:
    """Find, fetch or convert the model that `source` names.

    Args:
        source: `embedded`, a folder, a `.gguf` file, or a hub id (`owner/name` or `owner/name@revision`).
        cache: Where fetched and converted models are kept.

    Raises:
        InputError: If there is no such model, it cannot be fetched, its files are damaged, or it is a model only with
            code of its own (`kvpolicy.models.folder_check`).
    """
    cache = cache or default_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the model cache {cache} cannot be made ({error.strerror}): set KVP_CACHE to a folder that can be written"
        ) from error
    with _readable(source):
        return _resolve(source, Path(source).expanduser(), cache)


def _resolve(source: str, path: Path, cache: Path) -> ModelReference:
    if source == EMBEDDED:
        return _reference(embedded_model_folder(cache), name=NAME, source=source, revision=WHEEL)
    if path.suffix == ".gguf":
        folder = _gguf_place(path, cache)
        if not folder.exists():
            convert_gguf(path, folder)
        return _reference(folder, name=path.stem, source=str(path.resolve()), revision="")
    if source and path.is_dir():
        return _reference(path.resolve(), name=path.resolve().name, source=str(path.resolve()), revision="")
    if is_hub_id(source):
        return _from_hub(source, cache)
    if is_registered(source):
        raise InputError(f"model {source} is in MLflow's registry of a home: `kvp run --model` finds it there")
    raise InputError(
        f"model {source!r} is no folder, GGUF file or hub id (owner/name), nor in MLflow's registry "
        f"(models:/NAME/VERSION): pass one of these with --model, or {EMBEDDED!r}"
    )


def find_model(source: str, *, cache: Path | None = None) -> ModelReference | None:
    """Find what `resolve_model` would, as far as it lies here: nothing is fetched or converted.

    Returns:
        None for a model that would have to be fetched or converted first.

    Raises:
        InputError: If there is no such model, or its files are damaged.
    """
    cache = cache or default_cache()
    with _readable(source):
        path = Path(source).expanduser()
        if source == EMBEDDED and not embedded_model_place(cache).exists():
            return None
        if path.suffix == ".gguf" and not _gguf_place(path, cache).exists():
            return None
        if is_hub_id(source) and not path.is_dir():
            try:
                return _from_hub(source, cache, only_local=True)
            except InputError:
                return None
    return resolve_model(source, cache=cache)


@contextmanager
def _readable(source: str) -> Iterator[None]:
    """Make one line of a model that cannot be read: its name is too long, a folder is closed to this user."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        raise InputError(f"model {source[:80]!r} cannot be read ({reason[:200]}): check its path and rights") from error
    except RuntimeError as error:  # of `expanduser`: there is no such user
        raise InputError(f"model {source!r}: {error}") from error


def is_hub_id(source: str) -> bool:
    """Whether a reference has the form `owner/name` or `owner/name@revision`; a folder may have it as well."""
    is_other = source.startswith((".", "/", "~")) or source.endswith(".gguf") or is_registered(source)
    return source.count("/") == 1 and not is_other


def _gguf_place(path: Path, cache: Path) -> Path:
    """Folder of a converted GGUF file, whether it is there or not."""
    if not path.is_file():
        raise InputError(f"GGUF file {path} does not exist: check the path given to --model")
    return converted_place(path.stem, digest_file(path), cache)


def _from_hub(source: str, cache: Path, *, only_local: bool = False) -> ModelReference:
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")

    def fetch(revision: str | None, patterns: Sequence[str]) -> Path:
        try:
            folder = snapshot_download(
                name,
                revision=revision,
                cache_dir=cache / "hub",
                allow_patterns=list(patterns),
                etag_timeout=10,
                local_files_only=only_local,
            )
        except Exception as error:  # network, permission and naming errors have a dozen types
            reason = first_line(error)
            raise InputError(
                f"model {source!r} cannot be fetched from the hub: {reason}; "
                "check the id, or download it elsewhere and pass the folder with --model"
            ) from error
        return Path(folder)

    described = fetch(revision or None, ["*.json"])
    _require_loadable(described, source)  # before its weights are fetched
    folder = fetch(described.name, CONTENT_PATTERNS)
    return _reference(folder, name=name, source=name, revision=folder.name)


def _reference(folder: Path, *, name: str, source: str, revision: str) -> ModelReference:
    check_recorded_digests(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"model folder {folder} has no config.json: it must be in Hugging Face's format")
    _require_loadable(folder, str(folder))
    contents = {name: digest_file(folder / name) for name in content_files(folder)}
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    return ModelReference(name=name, source=source, revision=revision, folder=folder, digest=digest)


def _require_loadable(folder: Path, model: str) -> None:
    try:
        require_loadable_folder(folder)
    except InputError as error:
        raise InputError(f"model {model}: {error}") from None  # a fault of the model, not of reaching it
