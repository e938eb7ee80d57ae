"""OpenLineage: events are valid, are built from the catalog, and reach files and receivers whatever happens."""

from __future__ import annotations

import copy
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from storage import openlineage_delivery
from storage.artifacts import Artifact
from storage.catalog import Catalog
from storage.digests import digest_bytes
from storage.environment import public_url
from storage.errors import StorageError
from storage.home import Home
from storage.openlineage_delivery import event_lines, send_events
from storage.openlineage_events import run_events, run_uuid
from storage.parquet import write_rows
from storage.recorded_runs import recorded_runs
from tests.storage.conftest import artifact, curve_row
from tests.storage.openlineage_checks import problems

FLOW_RUN = "d70bf81b-2f56-4231-9b4d-7c599ef1e665"
MODEL = Artifact(kind="model", digest=digest_bytes(b"m"), name='a "model" <b>&', uri="file:///models/m%20odel")


@pytest.fixture(autouse=True)
def _no_receiver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Neither the variables nor the configuration of whoever runs the tests; the client sets variables, too."""
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(openlineage_delivery, "_SILENCE", openlineage_delivery._Silence())
    yield
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE__TRANSPORT__TRANSPORTS__")]:
        del os.environ[name]


def record(catalog: Catalog, home: Home, stage: str = "evaluate", fail: BaseException | None = None) -> str:
    catalog.register(MODEL)
    with catalog.record_run(
        stage=stage,
        stage_key="k" * 64,
        parameters={"budgets": [1, 2], "text": "<&'\""},
        inputs={"model": MODEL.artifact_id, "again": MODEL.artifact_id},
        code_fingerprint="f" * 64,
        seed=3,
        prefect_flow_run_id=FLOW_RUN,
        prefect_task_run_id="task",
    ) as run:
        path = home.prompts / "p.parquet"
        write_rows(path, [{"text": "a", "count": 1}])
        run.output(
            "prompts",
            Artifact(
                kind="prompts",
                digest=digest_bytes(b"p"),
                name="p",
                uri=str(path),
                metadata={"num_samples": 7, "num_bytes": 99},
            ),
        )
        curve = artifact("curve", "c")
        run.output("curve", curve)
        run.append("curves", [curve_row(curve.artifact_id, budget, 0.5) for budget in (64, 128, 256)])
        run.output("traces", Artifact(kind="trace_fragment", digest=digest_bytes(b"t"), name="t", uri="s3://b/x"))
        if fail is not None:
            raise fail
    return run.run_id


def events_in(home: Home) -> list[dict[str, Any]]:
    """All that a reader finds, in the order of the names of its files."""
    files = sorted((home.path / "openlineage").rglob("*"))
    return [json.loads(line) for path in files if path.is_file() for line in path.read_text().splitlines()]


def test_a_run_leaves_valid_events_that_say_what_the_catalog_says(catalog: Catalog, home: Home) -> None:
    run_id = record(catalog, home)
    start, end = events_in(home)
    assert [problem for event in (start, end) for problem in problems(event)] == []
    assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
    (row,) = catalog.rows("runs")
    assert (start["eventTime"], end["eventTime"]) == tuple(
        row[name].isoformat(timespec="microseconds") + "Z" for name in ("started_at", "ended_at")
    )
    assert start["run"]["runId"] == end["run"]["runId"] == run_uuid(run_id)
    assert (end["job"]["namespace"], end["job"]["name"]) == ("kvpolicy", "evaluate")
    assert end["run"]["facets"]["parent"]["run"]["runId"] == FLOW_RUN
    stage = end["run"]["facets"]["kvpolicy_stage"]
    assert (stage["catalogRunId"], stage["stageKey"], stage["seed"]) == (run_id, "k" * 64, 3)
    assert stage["parameters"] == {"budgets": [1, 2], "text": "<&'\""}
    assert end["job"]["facets"]["sourceCodeLocation"]["version"] == row["git_commit"]
    # A dataset once, whatever it is to the run; code and environment are facets.
    assert [entry["name"] for entry in end["inputs"]] == [MODEL.artifact_id]
    assert stage["inputs"]["again"] == MODEL.artifact_id
    made = {entry["name"].split("-")[0]: entry for entry in end["outputs"]}
    assert set(made) == {"prompts", "curve", "trace_fragment"}
    assert made["prompts"]["facets"]["version"]["datasetVersion"] == digest_bytes(b"p")
    assert (
        made["prompts"]["outputFacets"]["outputStatistics"] | {"rowCount": 7, "size": 99}
        == (made["prompts"]["outputFacets"]["outputStatistics"])
    )
    assert made["curve"]["outputFacets"]["outputStatistics"]["rowCount"] == 3
    assert made["trace_fragment"]["facets"]["dataSource"]["uri"] == "s3://b/x"
    fields = {kind: [field["name"] for field in entry["facets"]["schema"]["fields"]] for kind, entry in made.items()}
    assert fields["prompts"] == ["text", "count"]
    assert fields["trace_fragment"] == ["keys", "values", "importance"]
    assert "ci_low" in fields["curve"]


def test_the_same_events_are_made_of_the_catalog_alone(catalog: Catalog, home: Home) -> None:
    record(catalog, home)
    with pytest.raises(RuntimeError):
        record(catalog, home, "train", RuntimeError("out of memory\nand more"))
    lines = [event_lines(run_events(recorded)) for recorded in recorded_runs(Catalog(home))]
    written = [path.read_text() for path in (home.path / "openlineage").rglob("*.jsonl")]
    assert sorted(lines) == sorted(written)
    assert recorded_runs(catalog, ["run-unknown"]) == recorded_runs(catalog, []) == []


def test_a_failed_run_says_why_and_claims_no_output(catalog: Catalog, home: Home) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        record(catalog, home, fail=RuntimeError("out of memory\nand more"))
    start, end = events_in(home)
    assert problems(start) + problems(end) == []
    assert (start["eventType"], end["eventType"]) == ("START", "FAIL")
    assert end["outputs"] == []
    error = end["run"]["facets"]["errorMessage"]
    assert (error["message"], error["programmingLanguage"]) == ("RuntimeError: out of memory", "PYTHON")


def test_a_skipped_run_has_no_events(catalog: Catalog, home: Home) -> None:
    run_id = record(catalog, home)
    before = events_in(home)
    catalog.record_skip(stage="evaluate", stage_key="k" * 64, reused_run_id=run_id)
    assert events_in(home) == before
    assert [len(run_events(recorded)) for recorded in recorded_runs(catalog)] == [2, 0]


def test_a_repeated_run_has_made_what_it_made(catalog: Catalog, home: Home) -> None:
    run_id = record(catalog, home)
    catalog_run = catalog.record_run(
        stage="evaluate", stage_key="k" * 64, parameters={}, inputs={}, code_fingerprint="f", repeats=run_id
    )
    with catalog_run as run:
        run.output("curve", artifact("curve", "c"))
        run.append("curves", [curve_row(artifact("curve", "c").artifact_id, 64, 0.5)])
    (path,) = (home.path / "openlineage").glob(f"*/{run.run_id}.jsonl")
    start, end = map(json.loads, path.read_text().splitlines())
    assert problems(start) + problems(end) == []
    assert (end["eventType"], end["run"]["facets"]["kvpolicy_stage"]["outcome"]) == ("COMPLETE", "repeated")
    assert end["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 1
    (recorded,) = recorded_runs(catalog, [run.run_id])
    assert event_lines(run_events(recorded)) == path.read_text()


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(event: dict[str, Any]) -> None:
        place: Any = event
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("eventTime", to="yesterday"),
        _set("eventType", to="FINISHED"),
        _set("run", "runId", to="run-0123456789abcdef"),
        _set("producer", to="no uri"),
        _set("job", to={"name": "evaluate"}),
        _set("inputs", 0, "facets", "version", "datasetVersion", to=3),
        _set("inputs", 0, "facets", "version", "_producer", to=None),
        _set("outputs", 0, "outputFacets", "outputStatistics", "rowCount", to="many"),
        _set("run", "facets", "kvpolicy_stage", "stageKey", to=""),
        _set("run", "facets", "kvpolicy_stage", "seed", to="three"),
        _set("job", "facets", "sourceCodeLocation", "url", to="not-a-url"),
    ],
)
def test_a_wrong_event_is_noticed(catalog: Catalog, home: Home, change: Callable[[dict[str, Any]], None]) -> None:
    record(catalog, home)
    event = events_in(home)[1]
    wrong = copy.deepcopy(event)
    change(wrong)
    assert problems(event) == []
    assert problems(wrong)


def test_a_run_that_is_going_on_or_was_killed_has_its_start(catalog: Catalog, home: Home) -> None:
    script = (
        "import os, sys\nfrom storage.catalog import Catalog\nfrom storage.home import Home\n"
        "with Catalog(Home.open(sys.argv[1])).record_run(stage='s', stage_key='k', parameters={}, inputs={},"
        " code_fingerprint='f'):\n    os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(home.path)], cwd=_ROOT, check=False, timeout=60)
    assert killed.returncode == -9
    (event,) = events_in(home)
    assert event["eventType"] == "START" and problems(event) == []
    assert recorded_runs(catalog) == []


_ROOT = Path(__file__).parents[2]
_MANY = """
import sys
from storage.catalog import Catalog
from storage.home import Home
catalog = Catalog(Home.open(sys.argv[1]))
for index in range(int(sys.argv[2])):
    with catalog.record_run(stage="s", stage_key=f"{sys.argv[3]} {index}", parameters={"filler": "x" * 20000},
                            inputs={}, code_fingerprint="f"):
        pass
"""


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


def test_ids_of_runs_are_uuids_that_never_change() -> None:
    assert run_uuid("run-0123456789abcdef") == "230de9a5-300e-529b-99f6-ef00b5be58d4"
    assert uuid.UUID(run_uuid("run-1")).version == 5
    assert run_uuid("run-1") != run_uuid("run-2")


@pytest.mark.parametrize(
    ("remote", "shown"),
    [
        ("https://me:token@example.org/a/b.git", "https://example.org/a/b.git"),
        ("https://example.org/a/b.git?token=x", "https://example.org/a/b.git"),
        ("git@example.org:a/b.git", "ssh://example.org/a/b.git"),
        ("/srv/git/b.git", ""),
        ("", ""),
    ],
)
def test_remotes_show_no_credentials(remote: str, shown: str) -> None:
    assert public_url(remote) == shown
