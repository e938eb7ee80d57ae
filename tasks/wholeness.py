"""Whether what a stage made is still there and still what it was. What is not is made again.

Traces are too many to be read for this: theirs is checked by every read, and by `kvp traces verify`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from storage.catalog import Artifact
from storage.errors import StorageError
from storage.home import Home
from storage.parquet import read_rows
from storage.token_ranks import is_whole as has_whole_ranks
from storage.traces import TraceStore
from tasks.trained import is_whole_trained


def find_damaged(home: Home, artifacts: Iterable[Artifact]) -> list[Artifact]:
    """Artifacts that are lost or damaged; fragments of traces, of which there may be thousands, are only looked for.

    Raises:
        StorageError: If the trace store cannot be reached, or its manifest is lost.
    """
    store = TraceStore(home.traces)
    fragments: dict[str, Artifact] = {}
    others: list[Artifact] = []
    for artifact in artifacts:
        if artifact.kind == "trace_fragment":
            fragments[artifact.uri.rpartition("/")[2]] = artifact
        elif artifact.kind == "trace_snapshot":
            store.version()  # a list of fragments, which are looked for themselves; but the manifest has to be there
        else:
            others.append(artifact)
    lost = store.missing(fragments)
    return [artifact for name, artifact in fragments.items() if name in lost] + [
        artifact for artifact in others if not is_whole(artifact)
    ]


def is_whole(artifact: Artifact) -> bool:
    """Whether an artifact lies where the catalog says, undamaged; true where the catalog is all of it."""
    place = Path(artifact.uri)
    check = _CHECKS.get(artifact.kind)
    return not artifact.uri or (place.exists() and (check is None or check(place, artifact.digest)))


def _is_whole_evaluation(place: Path, digest: str) -> bool:
    return _readable("scores.parquet", "costs.parquet")(place, digest) and has_whole_ranks(place)


def _readable(*names: str) -> Callable[[Path, str], bool]:
    """A check of a file of rows, or of those in a folder that are named."""

    def check(place: Path, digest: str) -> bool:
        del digest  # the files carry one of their own, of their rows
        try:
            for path in [place / name for name in names] or [place]:
                read_rows(path)
        except StorageError:
            return False
        return True

    return check


_CHECKS: Mapping[str, Callable[[Path, str], bool]] = {
    **{kind: partial(is_whole_trained, kind) for kind in ("policy_set", "head_group", "soft_tokens")},
    "prompts": _readable(),
    "evaluation_shard": _is_whole_evaluation,
    "analysis_shard": _readable("scores.parquet", "findings.parquet"),
}
