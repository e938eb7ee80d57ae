"""Artifacts: what runs read and make, named by kind and content."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpolicy.digests import canonical_json, digest_json, short_id
from storage.environment import Environment
from storage.errors import StorageError

# Inputs that say why and where a run ran, not what its result is made of.
SURROUNDINGS = frozenset({"code", "environment", "request"})
_KIND = re.compile(r"[a-z]+(_[a-z]+)*")
_DIGEST = re.compile(r"[0-9a-f]{32,64}")


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A thing with content.

    Attributes:
        kind: its kind, in small letters and underscores, such as `policy_set`.
        digest: digest of the content, 32 to 64 hexadecimal characters.
        name: name for people.
        uri: where the content lies; "" when the catalog's rows are the content.
        metadata: further facts, as JSON values.
    """

    kind: str
    digest: str
    name: str
    uri: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise StorageError(f"artifact kind {self.kind!r}: expected small letters and underscores")
        if not _DIGEST.fullmatch(self.digest):
            raise StorageError(
                f"artifact {self.name!r} has digest {self.digest!r}: expected 32-64 hexadecimal characters"
            )
        canonical_json(self.metadata)

    @property
    def artifact_id(self) -> str:
        """Id of the content."""
        return short_id(self.kind, self.digest)

    def to_row(self) -> dict[str, Any]:
        """Return the row of the table `artifacts`."""
        return {
            "artifact_id": self.artifact_id,
            "kind": self.kind,
            "digest": self.digest,
            "name": self.name,
            "uri": self.uri,
            "metadata_json": canonical_json(self.metadata),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Artifact:
        """Make the artifact of a row."""
        return cls(
            kind=row["kind"],
            digest=row["digest"],
            name=row["name"],
            uri=row["uri"],
            metadata=json.loads(row["metadata_json"]),
        )


def code_artifact(code_fingerprint: str, environment: Environment, modules: Mapping[str, str]) -> Artifact:
    """Return the code that a run ran: its fingerprint, the modules under it, and the commit that it was taken from."""
    commit, dirty = environment.git_commit, environment.git_dirty
    metadata: dict[str, Any] = {"git_commit": commit, "git_dirty": dirty, "code_fingerprint": code_fingerprint}
    metadata |= {"modules": dict(modules)} if modules else {}
    state = f"{commit[:12]}{' with changes' if dirty else ''}" if commit else "unknown"
    name = f"commit {state}, sources {code_fingerprint[:12]}"
    return Artifact(kind="code", digest=digest_json(metadata), name=name, metadata=metadata)


def environment_artifact(environment: Environment) -> Artifact:
    """Return the surroundings of a run."""
    return Artifact(
        kind="environment",
        digest=environment.digest,
        name=f"Python {environment.python} on {environment.hardware}",
        metadata=environment.to_json(),
    )


def request_artifact(request: Mapping[str, Any], name: str) -> Artifact:
    """Return what a pipeline was asked for, as JSON values; the same request is the same artifact."""
    return Artifact(kind="request", digest=digest_json(request), name=name, metadata=request)
