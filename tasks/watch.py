"""Looking for models that the catalog does not know, and remembering what became of each.

The table `watched` has every model that a source showed, by its state (names, sizes and times of its files) and by the
digest of its content. What is known by its state is not even read again, and nothing is started twice for a digest. A
row says what has happened, not what will, so that whoever is killed goes on where it was. Starting is the flow's.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpolicy.errors import InputError, first_line
from kvpolicy.inference.loading import load_language_model
from kvpolicy.models.model_sources import HUB, REGISTRY, Candidate, ModelSource
from kvpolicy.models.registered import RegisteredName
from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.home import Home
from storage.mlflow.registered_models import RegisteredModels
from storage.tables.lance_table import quote
from tasks.framework.stage import stage_task
from tasks.model import find, resolve

WAITING, FOUND, KNOWN, UNSUPPORTED, STARTED, FAILED = "waiting", "found", "known", "unsupported", "started", "failed"
ATTEMPTS = 3
_ENDS = (KNOWN, UNSUPPORTED, STARTED)

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A model that a source shows, or a source that shows none, and what became of it.

    Attributes:
        source: The source.
        reference: The model, as a pipeline is given it; the source itself if that cannot be looked at.
        outcome: `waiting` for the rest of its files; `found`, to be started; `known` already; `unsupported`;
            `started`; `failed`.
        reason: Why.
        state: Of its files; empty while they change.
        digest: Of its content (`kvpolicy.models.model_sources.Candidate.digest`); empty while that is not read.
        model_digest: Digest of the model that it gives; empty until that was made.
        flow_run_id: Prefect flow run of its pipeline; empty if none was started.
    """

    source: str
    reference: str
    outcome: str
    reason: str = ""
    state: str = ""
    digest: str = ""
    model_digest: str = ""
    flow_run_id: str = ""


@stage_task("look-for-models")
def look_for_models(home: Home, sources: Sequence[ModelSource], *, settle_s: float) -> list[Sighting]:
    """What sources show that was not dealt with: each model found, known, waiting, unsupported or failed.

    Nothing is written, fetched or converted.

    Args:
        home: The home.
        sources: Where to look.
        settle_s: How long the files of a new model must stay as they are, in seconds.
    """
    rows = _rows(home)
    sightings: list[Sighting] = []
    fresh: list[Candidate] = []
    for source in sources:
        try:
            fresh += [one for one in _candidates(home, source) if not _was_dealt_with(rows, one)]
        except (InputError, StorageError) as error:
            failed = Sighting(source=str(source), reference=str(source), outcome=FAILED, reason=str(error))
            sightings.append(failed)
    if not all(one.is_fixed for one in fresh):
        time.sleep(settle_s)
    for candidate in {one.reference: one for one in fresh}.values():
        sighting = _look_at(home, rows, candidate)
        # Of two that are the same the second is left for the next look, when it is known what became of the first.
        if sighting.outcome != FOUND or all(sighting.digest != other.digest for other in sightings):
            sightings.append(sighting)
    return sightings


@stage_task("check-model")
def check_model(home: Home, sighting: Sighting, *, dtype: str) -> Sighting:
    """Fetch or convert a model that was found, and load it once: is it another than all that are known, and supported?

    Args:
        home: The home.
        sighting: The model.
        dtype: In which the pipeline will run it.

    Returns:
        The same as `found` with the model's digest, or as `known`, `unsupported` or `failed` with the reason.
    """
    try:
        model = resolve(home, sighting.reference)
    except InputError as error:
        return _refused(sighting, error)
    except StorageError as error:
        return retry_later(sighting, str(error))
    sighting = dataclasses.replace(sighting, model_digest=model.digest)
    if not _was_begun(_rows(home), sighting.digest) and (name := _known_as(home, model.digest)):
        return dataclasses.replace(sighting, outcome=KNOWN, reason=f"the catalog has it as {name}")
    try:
        load_language_model(model.folder, dtype=dtype)
    except InputError as error:
        return _refused(sighting, error)
    return sighting


def retry_later(sighting: Sighting, reason: str) -> Sighting:
    """Note a failure whose cause is not the model: the next look tries the model again."""
    return dataclasses.replace(sighting, outcome=FAILED, reason=reason, digest="")


def remember(home: Home, sighting: Sighting) -> None:
    """Note what became of a model, unless that is what the last note about it says."""
    row = dataclasses.asdict(sighting)
    last = next((known for known in reversed(_rows(home)) if known["reference"] == sighting.reference), None)
    tells = ("outcome", "state", "digest") if sighting.digest else ("outcome", "digest")
    is_attempt = sighting.outcome == FAILED and sighting.digest  # they are counted
    if last is None or is_attempt or any(row[name] != last[name] for name in tells):
        Catalog(home).append("watched", [row])


def _candidates(home: Home, source: ModelSource) -> list[Candidate]:
    if source.kind != REGISTRY:
        return source.candidates()
    asked = RegisteredName.of_source(source.place)
    version = RegisteredModels(home).find(asked.name, alias=asked.alias)
    return [Candidate(source=str(source), reference=version.reference, state=version.identity)]


def _look_at(home: Home, rows: Sequence[Row], candidate: Candidate) -> Sighting:
    sighting = Sighting(source=candidate.source, reference=candidate.reference, outcome=FOUND)
    try:
        candidate.require_supported_form()
        if candidate.present_state() != candidate.state:
            return dataclasses.replace(sighting, outcome=WAITING, reason="its files are still changing")
        if missing := candidate.missing():
            return dataclasses.replace(sighting, outcome=WAITING, reason=missing)
        digest = candidate.digest()
    except InputError as error:  # there is no digest yet; once the files change it is looked at again
        return _refused(dataclasses.replace(sighting, state=candidate.state, digest=candidate.state), error)
    except OSError as error:
        return retry_later(sighting, f"it cannot be read: {error.strerror or first_line(error)}")
    return _compared(home, rows, dataclasses.replace(sighting, state=candidate.state, digest=digest))


def _refused(sighting: Sighting, error: InputError) -> Sighting:
    """A model that cannot be used: unsupported, unless a full disk, a missing folder or the network is why."""
    cause = error.__cause__
    full_or_missing = isinstance(cause, OSError) and cause.errno is not None
    unreachable = not sighting.model_digest and cause is not None and ModelSource.parse(sighting.source).kind == HUB
    if full_or_missing or unreachable:
        return retry_later(sighting, str(error))
    return dataclasses.replace(sighting, outcome=UNSUPPORTED, reason=str(error))


def _compared(home: Home, rows: Sequence[Row], sighting: Sighting) -> Sighting:
    """A model whose content is known now, told from those that were dealt with."""
    if end := _end_of(rows, sighting.digest):
        outcome = UNSUPPORTED if end["outcome"] == UNSUPPORTED else KNOWN
        reason = end["reason"] if outcome == UNSUPPORTED else f"{end['reference']} has the same content"
        return dataclasses.replace(sighting, outcome=outcome, reason=reason)
    if _was_begun(rows, sighting.digest):
        return sighting
    try:
        lies_here = find(home, sighting.reference)
    except (InputError, StorageError) as error:  # what was once made of it is damaged, which says how to be mended
        return retry_later(sighting, str(error))
    if lies_here is not None and (name := _known_as(home, lies_here.digest)):
        reason = f"the catalog has it as {name}"
        return dataclasses.replace(sighting, outcome=KNOWN, reason=reason, model_digest=lies_here.digest)
    return sighting


def _rows(home: Home) -> list[dict[str, Any]]:
    return Catalog(home).rows("watched")


def _was_dealt_with(rows: Sequence[Row], candidate: Candidate) -> bool:
    """Whether this state of a model is one that had an end: nothing has to be read to know that."""
    same = (row for row in rows if (row["reference"], row["state"]) == (candidate.reference, candidate.state))
    return any(row["digest"] and _end_of(rows, row["digest"]) for row in same)


def _end_of(rows: Sequence[Row], digest: str) -> Row | None:
    """The row after which nothing more is done about a content; None while there is something to do."""
    of_digest = [row for row in rows if row["digest"] == digest]
    failures = [row for row in of_digest if row["outcome"] == FAILED]
    ends = [row for row in of_digest if row["outcome"] in _ENDS] + failures[ATTEMPTS - 1 :]
    return ends[0] if ends else None


def _was_begun(rows: Sequence[Row], digest: str) -> bool:
    """Whether a watcher has begun to start it: that the catalog knows the model is then its own doing."""
    return any(row["digest"] == digest and row["outcome"] == FOUND for row in rows)


def _known_as(home: Home, model_digest: str) -> str:
    """Artifact of a model that the catalog knows, or empty."""
    rows = Catalog(home).rows("models", f"digest = {quote(model_digest)}", ["model_id"])
    return str(rows[0]["model_id"]) if rows else ""
