"""What methods are made from: saved in the home under the digest of its content, and loaded for a model again."""

import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvpolicy.policies import policy_set, soft_tokens
from kvpolicy.policies.policy_set import PolicySet, load_policy
from kvpolicy.policies.saved import SavedKind
from kvpolicy.policies.soft_tokens import SoftTokens, load_soft_tokens
from storage.catalog.catalog import Artifact
from storage.home import Home
from tasks.framework.references import ModelRef, TrainedRef
from tasks.framework.wholeness import check_files, declare_kind

Trained = PolicySet | SoftTokens


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How one kind of artifact lies in a folder, and what a method's parameter for it is called."""

    parameter: str
    load: Callable[..., Trained]
    saved: SavedKind


_POLICY = _Kind(parameter="policy", load=load_policy, saved=policy_set.SAVED)
_KINDS: Mapping[str, _Kind] = {
    "policy_set": _POLICY,
    "head_group": _POLICY,
    "soft_tokens": _Kind(parameter="soft_tokens", load=load_soft_tokens, saved=soft_tokens.SAVED),
}


def save_trained(home: Home, made: Trained, name: str, *, kind: str) -> Artifact:
    """Save under the digest of the content; the folder appears when it is complete."""
    home.policies.mkdir(parents=True, exist_ok=True)
    draft = home.policies / f".draft-{uuid.uuid4().hex}"
    try:
        digest = made.save(draft)
        folder = home.policies / f"{kind}-{digest[:16]}"
        if folder.exists() and not is_whole_trained(kind, folder, digest):
            shutil.rmtree(folder)  # damaged since
        if not folder.exists():
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Artifact(kind=kind, digest=digest, name=name, uri=str(folder))


def is_whole_trained(kind: str, folder: Path, digest: str) -> bool:
    """Whether a folder still holds what was saved there."""
    try:
        return _KINDS[kind].saved.digest(folder) == digest
    except OSError:
        return False


def method_parameters(reference: TrainedRef, model: ModelRef, device: str) -> dict[str, Trained]:
    """What was trained, as the parameter of the methods that are made from it.

    Raises:
        InputError: If it cannot be read, or was trained for another model.
    """
    kind = _KINDS[reference.kind]
    made = kind.load(Path(reference.path), device=device)
    made.require_model(model.digest)
    return {kind.parameter: made}


for _kind in _KINDS:
    declare_kind(_kind, check_files(partial(is_whole_trained, _kind)))
