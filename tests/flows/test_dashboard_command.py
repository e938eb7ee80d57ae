"""`kvp dashboard` on the command line: what it refuses is one line. Its pages have tests of their own."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Finished

from dashboards.app.server import open_port
from flows.dashboard_commands import running_services
from flows.service_process import MLFLOW, SERVER, start, stop
from storage.home import FORMAT_VERSION, Home

Command = Callable[..., Finished]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    from flows.cli import main

    def run(*args: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["kvp", "dashboard", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        code = ended.value.code
        return Finished(code=code if isinstance(code, int) else 1, stdout=said.out, stderr=said.err)

    return run


def assert_one_line(done: Finished, words: str) -> None:
    assert done.code == 1
    assert done.stdout == ""
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_place_without_a_home_is_refused_and_left_as_it_is(command, tmp_path: Path):
    assert_one_line(command("--home", str(tmp_path / "none")), "no home at")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({"format_version": FORMAT_VERSION + 1}), f"has format version {FORMAT_VERSION + 1}"),
        ("{", "home.json is damaged"),
    ],
)
def test_a_home_of_another_release_or_half_made_is_refused(command, tmp_path: Path, content, words):
    (tmp_path / "home.json").write_text(content)
    assert_one_line(command("--home", str(tmp_path)), words)


def test_a_port_in_use_is_refused(command, tmp_path: Path):
    Home.open(tmp_path / "home")
    with open_port(0) as taken:
        port = taken.getsockname()[1]
        done = command("--home", str(tmp_path / "home"), "--port", str(port))
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
