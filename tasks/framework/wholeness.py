"""Whether what a stage made is still there and still what it was. What is not is made again.

Every kind of artifact is declared beside what makes it, with how to find those that are damaged.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from storage.catalog.catalog import Artifact
from storage.errors import StorageError
from storage.home import Home
from storage.tables.parquet import read_rows

FindDamaged = Callable[[Home, Sequence[Artifact]], list[Artifact]]
_KINDS: dict[str, FindDamaged] = {}


def declare_kind(kind: str, find: FindDamaged) -> None:
    """Declare a kind of artifact, once.

    Args:
        kind: Its name, such as `prompts`.
        find: Returns those of some artifacts of this kind that are lost or damaged.
    """
    if kind in _KINDS:
        raise ValueError(f"artifacts of kind {kind!r} are declared twice: give one of them another name")
    _KINDS[kind] = find


def find_damaged(home: Home, artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Artifacts that are lost or damaged.

    Raises:
        StorageError: If a kind is not declared, the trace store cannot be reached, or its manifest is lost.
    """
    by_kind: dict[str, list[Artifact]] = {}
    for artifact in artifacts:
        by_kind.setdefault(artifact.kind, []).append(artifact)
    require_declared(by_kind)
    return [artifact for kind, alike in by_kind.items() for artifact in _KINDS[kind](home, alike)]


def require_declared(kinds: Iterable[str]) -> None:
    """Check that all of some kinds of artifacts are declared.

    Raises:
        StorageError: Naming the first one that is not.
    """
    if unknown := sorted({*kinds} - _KINDS.keys()):
        raise StorageError(f"artifacts of kind {unknown[0]} are declared by no stage: declare them where they are made")


def check_files(is_whole: Callable[[Path, str], bool] = lambda path, digest: True) -> FindDamaged:
    """Find damage artifact by artifact: each has to be there, and to pass a check of its path and digest.

    An artifact without a place is whole, as the catalog is all of it.
    """

    def find(home: Home, artifacts: Sequence[Artifact]) -> list[Artifact]:
        del home
        return [
            artifact
            for artifact in artifacts
            if artifact.uri and not (Path(artifact.uri).exists() and is_whole(Path(artifact.uri), artifact.digest))
        ]

    return find


def are_readable(*names: str) -> Callable[[Path, str], bool]:
    """A check of a file of rows, or of those in a folder that are named."""

    def check(path: Path, digest: str) -> bool:
        del digest  # the files carry one of their own, of their rows
        try:
            for file in [path / name for name in names] or [path]:
                read_rows(file)
        except StorageError:
            return False
        return True

    return check


def is_whole(home: Home, artifact: Artifact) -> bool:
    """Whether an artifact is there, undamaged."""
    return not find_damaged(home, [artifact])
