"""`kvp dashboard` on the command line: what it refuses is one line. Its pages have tests of their own."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from processes import Finished
from starlette.testclient import TestClient

from dashboards.app.records import Records
from dashboards.app.server import make_app, open_port
from flows.commands.dashboard import running_services
from flows.services.processes import MLFLOW, SERVER, start, stop
from storage.home import FORMAT_VERSION, Home
from tests.dashboards.report_home import EVALUATION, FIDELITY, make_home


def assert_one_line(done: Finished, words: str) -> None:
    assert done.code == 1
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_place_without_a_home_is_refused_and_left_as_it_is(kvp_alone, tmp_path: Path):
    assert_one_line(kvp_alone("dashboard", home=tmp_path / "none"), "no home at")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({"format_version": FORMAT_VERSION + 1}), f"has format version {FORMAT_VERSION + 1}"),
        ("{", "home.json is damaged"),
    ],
)
def test_a_home_of_another_release_or_half_made_is_refused(kvp_alone, tmp_path: Path, content, words):
    (tmp_path / "home.json").write_text(content)
    assert_one_line(kvp_alone("dashboard", home=tmp_path), words)


def test_a_port_in_use_is_refused(kvp_alone, tmp_path: Path):
    Home.open(tmp_path / "home")
    with open_port(0) as taken:
        port = taken.getsockname()[1]
        done = kvp_alone("dashboard", "--port", str(port), home=tmp_path / "home")
    assert_one_line(done, f"port {port} cannot be used (Address already in use): give the dashboard another --port")


def test_services_count_while_they_run(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    assert running_services(home) == {}
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    urls = {SERVER: "http://127.0.0.1:1", MLFLOW: "http://127.0.0.1:2"}
    started = [start(home, name, sleeping, url=url, env={}) for name, url in urls.items()]
    assert running_services(home) == {"prefect": urls[SERVER], "mlflow": urls[MLFLOW]}
    for service in started:
        stop(home, service)
    assert running_services(home) == {}


def test_a_single_task_and_some_seeds_are_compared_by_the_scores_of_samples(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    make_home(home)
    client = TestClient(make_app(home), base_url="http://127.0.0.1")
    asked = "/curves.csv?metric=kl&method=kvp"
    for choice, shift in (("task=vt", 0.0), ("task=mean&seed=1", 0.02), ("task=vt&seed=0", -0.02)):
        rows = list(csv.DictReader(io.StringIO(client.get(f"{asked}&{choice}").text)))
        assert [row["best_heuristic"] for row in rows] == ["snapkv", "h2o", "snapkv"]
        for row, own, best in zip(rows, FIDELITY["kvp"], (0.30, 0.21, 0.10), strict=True):
            assert float(row["difference"]) == pytest.approx(own * (1 + shift) - best)
            if "seed" in choice:  # all samples of a task have its planted mean, so that seeds alone differ
                assert float(row["difference_low"]) == pytest.approx(float(row["difference"]))
            else:
                assert float(row["difference_low"]) < float(row["difference"]) < float(row["difference_high"])
    page = client.get("/curves?task=vt").text
    assert "bands: intervals of paired differences" in page
    assert "None of the chosen methods has seed" not in page


def test_lost_scores_leave_the_differences_of_means(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    make_home(home)
    records = Records(home)
    (evaluation,) = (one for one in records.evaluations() if one.id == EVALUATION.artifact_id)
    wanted = ("query_agnostic", "string_match", "vt")
    rows = [row for row in records.curves(evaluation) if (row["setting"], row["metric"], row["task"]) == wanted]
    assert rows
    assert records.compared(evaluation, rows) == []
