"""OpenLineage's events reach files and receivers, whatever happens to them or to the run."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from storage.catalog.catalog import Catalog
from storage.catalog.recorded_runs import recorded_runs
from storage.errors import StorageError
from storage.home import Home
from storage.openlineage import delivery as openlineage_delivery
from storage.openlineage.delivery import send_events
from storage.openlineage.events import run_events, run_uuid
from tests.storage.openlineage_checks import problems
from tests.storage.openlineage_runs import events_in, record

pytestmark = pytest.mark.usefixtures("no_receiver")

_ROOT = Path(__file__).parents[3]
_MANY = """
import sys
from storage.catalog.catalog import Catalog
from storage.home import Home
catalog = Catalog(Home.open(sys.argv[1]))
for index in range(int(sys.argv[2])):
    with catalog.record_run(stage="s", stage_key=f"{sys.argv[3]} {index}", parameters={"filler": "x" * 20000},
                            inputs={}, code_fingerprint="f"):
        pass
"""


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted to it, and answers with a status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posts: list[tuple[str, str | None, dict[str, Any]]] = []
        self.status = 201
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver = self.server
        assert isinstance(receiver, Receiver)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        receiver.posts.append((self.path, self.headers.get("Authorization"), body))
        self.send_response(receiver.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OPENLINEAGE_URL", server.url)
        yield server
        server.shutdown()
        thread.join()


def test_a_run_that_is_going_on_or_was_killed_has_its_start(catalog: Catalog, home: Home) -> None:
    script = (
        "import os, sys\nfrom storage.catalog.catalog import Catalog\nfrom storage.home import Home\n"
        "with Catalog(Home.open(sys.argv[1])).record_run(stage='s', stage_key='k', parameters={}, inputs={},"
        " code_fingerprint='f'):\n    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(home.path)], cwd=_ROOT, check=False, timeout=60)
    assert killed.returncode == -9
    (event,) = events_in(home)
    assert event["eventType"] == "START" and problems(event) == []
    assert recorded_runs(catalog) == []


def test_many_processes_write_at_once_and_readers_see_whole_lines(home: Home, catalog: Catalog) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", _MANY, str(home.path), "8", name], cwd=_ROOT) for name in ("a", "b")
    ]
    while any(writer.poll() is None for writer in writers):
        for path in (home.path / "openlineage").rglob("*.jsonl"):
            assert {json.loads(line)["job"]["name"] for line in path.read_text().splitlines()} == {"s"}
    assert [writer.returncode for writer in writers] == [0, 0]
    events = events_in(home)
    assert [problem for event in events for problem in problems(event)] == []
    ids = [run_uuid(row["run_id"]) for row in catalog.rows("runs")]
    assert sorted((event["run"]["runId"], event["eventType"]) for event in events) == sorted(
        (name, kind) for name in ids for kind in ("START", "COMPLETE")
    )
    assert len(ids) == 16


def test_a_receiver_gets_every_event_of_a_run(
    catalog: Catalog, home: Home, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_ENDPOINT", "here/lineage")
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "secret")
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "our jobs")
    record(catalog, home)
    assert [(path, key) for path, key, _ in receiver.posts] == [("/here/lineage", "Bearer secret")] * 2
    sent = [event for _, _, event in receiver.posts]
    assert [problem for event in sent for problem in problems(event)] == []
    assert {event["job"]["namespace"] for event in sent} == {"our jobs"}
    for told, kept in zip(sent, events_in(home), strict=True):
        tags = told["run"]["facets"].pop("tags")  # the client's own: its version
        assert [tag["key"] for tag in tags["tags"]] == ["openlineage_client_version"]
        assert told == kept


@pytest.mark.parametrize("way", ["one variable", "variables", "file", "named file"])
def test_a_receiver_may_be_configured_as_the_client_has_it(
    catalog: Catalog, home: Home, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    monkeypatch.delenv("OPENLINEAGE_URL")
    transport = {"type": "http", "url": receiver.url}
    if way == "one variable":
        monkeypatch.setenv("OPENLINEAGE__TRANSPORT", json.dumps(transport))
    elif way == "variables":
        for name, value in transport.items():
            monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name.upper()}", value)
    else:
        path = tmp_path / ("openlineage.yml" if way == "file" else "elsewhere.yml")
        path.write_text(json.dumps({"transport": transport}))
        if way == "named file":
            monkeypatch.setenv("OPENLINEAGE_CONFIG", str(path))
    record(catalog, home)
    assert [event["eventType"] for _, _, event in receiver.posts] == ["START", "COMPLETE"]


def test_recorded_runs_are_sent_later(catalog: Catalog, home: Home, receiver: Receiver) -> None:
    record(catalog, home)
    receiver.posts.clear()
    assert send_events(event for recorded in recorded_runs(catalog) for event in run_events(recorded)) == 2
    assert [event["eventType"] for _, _, event in receiver.posts] == ["START", "COMPLETE"]
    receiver.status = 500
    with pytest.raises(StorageError, match="does not take event 1: 500"):
        send_events(event for recorded in recorded_runs(catalog) for event in run_events(recorded))


def test_sending_without_a_receiver_says_what_to_set(catalog: Catalog) -> None:
    with pytest.raises(StorageError, match="set OPENLINEAGE_URL"):
        send_events([])


@pytest.mark.parametrize("trouble", ["nobody listens", "it refuses", "the address is none", "the folder is in the way"])
def test_trouble_with_events_is_one_warning_and_not_the_run_s(
    catalog: Catalog,
    home: Home,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    if trouble == "nobody listens":
        monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    elif trouble == "it refuses":
        receiver.status = 403
    elif trouble == "the address is none":
        monkeypatch.setenv("OPENLINEAGE_URL", "nowhere")
    else:
        (home.path / "openlineage").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        record(catalog, home)
        record(catalog, home, "train")
    assert [row["outcome"] for row in catalog.rows("runs")] == ["completed", "completed"]
    (warning,) = caplog.records
    assert "\n" not in warning.getMessage() and "`kvp openlineage --send`" in warning.getMessage()
    assert len(receiver.posts) <= 1  # left alone for a while after it has failed


def test_a_receiver_that_hangs_is_waited_for_once(
    catalog: Catalog, home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(openlineage_delivery, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(3):
            record(catalog, home)
        silent.settimeout(0)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # nobody else has come: without retries, and never again
            silent.accept()
    assert len(caplog.records) == 1
    assert len(events_in(home)) == 6


def test_events_can_be_turned_off(
    catalog: Catalog, home: Home, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    record(catalog, home)
    assert receiver.posts == [] and not (home.path / "openlineage").exists()
