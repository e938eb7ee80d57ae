"""Where OpenLineage's events go: a file in the home, and a receiver if one is configured.

The home has one file a run, `openlineage/2026-11-30/run-….jsonl`: its START, and once it has ended both events, one a
line. A file is replaced as a whole, so a reader sees no half line whatever is killed, and no two processes write one.
A run that was killed keeps its START alone.

A receiver is configured as OpenLineage's client has it: OPENLINEAGE_URL (with OPENLINEAGE_ENDPOINT and
OPENLINEAGE_API_KEY), variables OPENLINEAGE__TRANSPORT__…, or a file openlineage.yml. OPENLINEAGE_DISABLED=true turns
events off. Whatever goes wrong here is one warning and never the run's failure: the catalog keeps what was to be told,
and `kvp openlineage --send` tells it later.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.errors import first_line
from storage.errors import StorageError
from storage.lineage.run_record import RecordedRun, Row
from storage.whole_files import write_whole

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent

    from storage.home import Home
    from storage.lineage.artifacts import Artifact
    from storage.lineage.recording import RunRecorder

FOLDER = "openlineage"
_LOGGER = logging.getLogger("kvpolicy")
_TIMEOUT_S = 3.0
_PAUSE_S = 60.0
_NO_RETRIES = {"total": 0, "read": 0, "connect": 0}
_CONFIGURATION_VARIABLES = (
    "OPENLINEAGE_URL",
    "OPENLINEAGE_CONFIG",
    "OPENLINEAGE__TRANSPORT",
    "OPENLINEAGE__TRANSPORT__TYPE",
)
_CONFIGURATION_FILES = ("openlineage.yml", "~/.openlineage/openlineage.yml")


class _Silence:
    """What this process remembers of its receiver: until when it is left alone, and whether that was said."""

    def __init__(self) -> None:
        self.until = 0.0
        self.said = False

    def note(self, error: Exception) -> None:
        self.until = time.monotonic() + _PAUSE_S
        if not self.said:
            self.said = True
            _LOGGER.warning(
                "OpenLineage events are not delivered (%s); `kvp openlineage --send` sends them later",
                first_line(error)[:160],
            )


_SILENCE = _Silence()


@contextmanager
def announced(
    home: Home, run: RunRecorder, known: Sequence[Artifact], committed: Callable[[], Iterable[Row]]
) -> Iterator[None]:
    """Emit the start of the run that the block is, and its end as the catalog then has it.

    Args:
        home: the home.
        run: the run.
        known: the artifacts that it reads, but for its surroundings.
        committed: reads the run's row from the catalog; no row if the run was not recorded.
    """
    if _disabled():
        yield
        return
    with _never_the_failure_of_a_run():
        _announce(home, RecordedRun.from_recorder(run, run.row(), known), has_ended=False)
    try:
        yield
    finally:
        with _never_the_failure_of_a_run():
            for row in committed():
                _announce(home, RecordedRun.from_recorder(run, row, known), has_ended=True)


def event_lines(events: Sequence[RunEvent]) -> str:
    """Return events as text, one JSON object a line."""
    from openlineage.client.serde import Serde

    return "".join(f"{Serde.to_json(event)}\n" for event in events)


def send_events(events: Iterable[RunEvent]) -> int:
    """Send events to the configured receiver, one after the other, and return how many they were.

    Raises:
        StorageError: if none is configured or it does not take an event.
    """
    if _disabled() or not _has_receiver():
        raise StorageError(
            "no OpenLineage receiver is configured: set OPENLINEAGE_URL, or see docs/lineage.md for other ways"
        )
    sent = 0
    try:
        with closing(_client()) as client:
            for event in events:
                client.emit(event)
                sent += 1
    except Exception as error:  # whatever a transport of the client's may raise
        raise StorageError(f"the OpenLineage receiver does not take event {sent + 1}: {first_line(error)}") from error
    return sent


def _announce(home: Home, recorded: RecordedRun, *, has_ended: bool) -> None:
    from storage.openlineage.events import run_events, start_event

    events = run_events(recorded) if has_ended else [start_event(recorded)]
    day = recorded.row["started_at"].strftime("%Y-%m-%d")
    path = home.path / FOLDER / day / f"{recorded.run_id}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, event_lines(events).encode())
    if _has_receiver() and time.monotonic() >= _SILENCE.until:
        with closing(_client()) as client:
            client.emit(events[-1])


@contextmanager
def _never_the_failure_of_a_run() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _SILENCE.note(error)


def _disabled() -> bool:
    return os.environ.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true"


def _has_receiver() -> bool:
    """Whether the client would find a transport; without one it prints events."""
    named = any(os.environ.get(name) for name in _CONFIGURATION_VARIABLES)
    return named or any(Path(path).expanduser().is_file() for path in _CONFIGURATION_FILES)


def _client() -> OpenLineageClient:
    from openlineage.client import OpenLineageClient
    from openlineage.client.transport.http import HttpTransport

    client = OpenLineageClient()
    client.config.facets.source_code_location.disabled = True  # it would name the checkout of the working folder
    transport, configured = client.transport, client.config.transport or {}
    if isinstance(transport, HttpTransport):
        # By itself it waits up to half a minute for a receiver that is not there.
        transport.timeout = configured.get("timeout", _TIMEOUT_S)
        transport.config.retry = {**_NO_RETRIES, **configured.get("retry", {})}
    return client
