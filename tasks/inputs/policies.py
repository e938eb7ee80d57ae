"""A policy set by what a user calls it: its folder, the champion, an artifact of the catalog, or MLflow's registry.

No task: nothing is recorded when a policy is used.
"""

import re
import tempfile
from pathlib import Path

from kvpolicy.errors import InputError
from kvpolicy.models.registered import RegisteredName, is_registered
from kvpolicy.names import CHAMPION
from kvpolicy.policies.policy_set import RECORD, WEIGHTS, PolicySet, load_policy
from storage.catalog.catalog import Catalog
from storage.catalog.promotions import read_history
from storage.home import Home
from storage.mlflow.registered_models import RegisteredModels


def policy_folder(reference: str) -> Path | None:
    """The folder that a reference names, or None if it names no folder that is there: then it takes a home."""
    try:
        folder = Path(reference).expanduser()
        return folder if reference not in ("", CHAMPION) and folder.is_dir() else None
    except (OSError, RuntimeError):  # a name that is too long, or of no user
        return None


def find_policy(home: Home | None, reference: str, *, model_digest: str, device: str = "cpu") -> PolicySet:
    """Load the policy set that a reference names, if it is of that model.

    Args:
        home: Where to look for what is no folder; None if there is none.
        reference: A folder, `champion` (of that model), an artifact of the home's catalog (6 or more first characters),
            or a version in its MLflow registry (`models:/NAME/VERSION` or `models:/NAME@champion`).
        model_digest: Of the model that it is to be used with.
        device: Where its weights shall be.

    Raises:
        InputError: If there is no such policy set, it cannot be read, or it was trained for another model.
        StorageError: If the catalog or the registry has nothing of that name, or cannot be read.
    """
    folder = policy_folder(reference)
    if folder is not None:
        policy = load_policy(folder, device=device)
    elif home is None:
        raise InputError(f"policy {reference!r} is no folder, and there is no home in which to look it up")
    elif is_registered(reference):
        policy = _from_registry(home, reference, device)
    else:
        policy = load_policy(_in_catalog(home, reference, model_digest), device=device)
    policy.require_model(model_digest)
    return policy


def _in_catalog(home: Home, reference: str, model_digest: str) -> Path:
    catalog = Catalog(home)
    if reference == CHAMPION:
        champion_id = read_history(catalog, model_digest).champion
        if not champion_id:
            raise InputError(
                f"model {model_digest[:16]} has no champion in {home.path}: train a policy set with `kvp run`, or name "
                "one with --policy"
            )
    else:
        if not re.fullmatch(r"[\w-]+", reference):  # a folder that is not there, or a file
            raise InputError(
                f"policy {reference!r} is no folder and no id: expected a folder of {RECORD} and {WEIGHTS}, "
                f"{CHAMPION}, an artifact's id or models:/NAME/1"
            )
        champion_id = catalog.lineage(reference, "down", most_steps=0).root
    if not champion_id.startswith("policy_set-"):
        raise InputError(f"{champion_id} is no policy set: `kvp lineage {champion_id}` shows what there is around it")
    return Path(catalog.artifact(champion_id).uri)


def _from_registry(home: Home, reference: str, device: str) -> PolicySet:
    asked = RegisteredName.of_reference(reference)
    registry = RegisteredModels(home)
    version = registry.find(asked.name, number=asked.number, alias=asked.alias)
    files = registry.names(version)
    if missing := {WEIGHTS, RECORD} - set(files):
        raise InputError(
            f"{version.reference} is no policy set: it has no {' and no '.join(sorted(missing))}, but "
            f"{', '.join(sorted(files)[:5])}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        for name in (WEIGHTS, RECORD):
            registry.fetch(version, name, Path(scratch) / name)
        return load_policy(scratch, device=device)
