"""What the tests of flows share: the command, one Prefect server, and one smoke run of the embedded model."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import Finished, environment, last_line, prefect_server, run_command

from tests.postgresql import PostgresqlServer, find_programs, postgresql_server

SMOKE = ("--preset", "smoke", "--tasks", "niah_single_1")  # half of the preset's tasks: it is run often
SMALL_METHODS = "kvp,judgeq,random,knorm,snapkv,adakv"
SMALL_SETTINGS = ("evaluate.num_analysed=1", "soft_tokens.num_steps=2", "soft_tokens.num_contexts=2")
Command = Callable[..., Finished]


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """The first run of some options in a new home."""

    options: tuple[str, ...]
    home: Path
    finished: Finished
    document: dict[str, Any]


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prefect server that lives as long as the tests: an embedded one takes each command 10 s or more."""
    with prefect_server(tmp_path_factory.mktemp("prefect-server")) as url:
        yield url


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """A PostgreSQL server of the tests' own."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL's programs (initdb, pg_ctl, psql) are not installed")
    with postgresql_server(programs) as server:
        yield server


@pytest.fixture(scope="session")
def server_environment(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of processes that use the server."""
    return environment(PREFECT_API_URL=prefect_api, PREFECT_HOME=str(tmp_path_factory.mktemp("prefect-client")))


@pytest.fixture(scope="session")
def kvp(server_environment: dict[str, str]) -> Command:
    """Runs `kvp` as a process that uses the server: `kvp("sql", "SELECT 1", home=folder)`."""

    def run(*args: str, home: Path | None = None, timeout_s: float = 180, **variables: str) -> Finished:
        command = ["kvp", *args, *(() if home is None else ("--home", str(home)))]
        return run_command(command, env={**server_environment, **variables}, timeout_s=timeout_s)

    return run


@pytest.fixture(scope="session")
def smoke_run(embedded_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> PipelineRun:
    """The whole pipeline, once, with the embedded model and Prefect's embedded server."""
    del embedded_model_folder  # fetched and converted before the clock runs
    home = tmp_path_factory.mktemp("smoke") / "home"
    finished = run_command(["kvp", "run", *SMOKE, "--home", str(home), "--json"], env=environment(), timeout_s=240)
    if finished.code:
        pytest.fail(f"kvp run ended with {finished.code}: {last_line(finished.stderr)}", pytrace=False)
    return PipelineRun(options=SMOKE, home=home, finished=finished, document=json.loads(finished.stdout))


@pytest.fixture(scope="session")
def small_model(
    embedded_model_folder: Path, tiny_model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of a tiny random model that has the embedded one's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder)
    folder = tmp_path_factory.mktemp("small") / "tiny-llama"
    shutil.copytree(
        tiny_model_folder("llama", vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=2), folder
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_run(prefect_api: str, small_model: Path) -> PipelineRun:
    """The same flow with every stage that there is, in this process, with a tiny model: a few seconds."""
    from flows.display.summary import summarise
    from flows.pipeline import retrain
    from flows.runtime.run_options import Choices
    from storage.home import Home

    home = small_model.parent / "home"
    try:
        with _settings(prefect_api):
            choices = Choices(tasks=["niah_single_1"], methods=SMALL_METHODS.split(","), settings=list(SMALL_SETTINGS))
            stages = retrain(preset="smoke", model=str(small_model), home=str(home), choices=choices)
    finally:
        logging.getLogger("kvpolicy").handlers.clear()  # it writes to what pytest takes away
    options = (part for setting in SMALL_SETTINGS for part in ("--set", setting))
    return PipelineRun(
        options=(*SMOKE, "--methods", SMALL_METHODS, *options, "--model", str(small_model)),
        home=home,
        finished=Finished(code=0, stdout="", stderr=""),
        document=summarise(Home.open(home), stages),
    )


@contextmanager
def _settings(prefect_api: str) -> Iterator[None]:
    """Settings of flows in this process: the server, and no logs that would still be on their way when it stops."""
    from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_api, PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield


@pytest.fixture
def prefect_here(prefect_api: str) -> Iterator[None]:
    """Lets flows of a test run in this process, with the server."""
    with _settings(prefect_api):
        yield


@pytest.fixture
def kvp_here(
    embedded_model_folder: Path,
    prefect_api: str,
    server_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Command:
    """Runs `kvp` in this process, which has loaded everything heavy already, with the same server."""
    del embedded_model_folder  # fetched and converted before, under bars that are not the command's
    foreign = ("PREFECT_", "KVP_HOME", "KVP_TRACES", "KVP_MLFLOW_URI", "OPENLINEAGE")
    for name in [name for name in os.environ if name.startswith(foreign)]:
        monkeypatch.delenv(name)
    for name in ("PREFECT_API_URL", "PREFECT_HOME"):
        monkeypatch.setenv(name, server_environment[name])

    def run(*args: str, home: Path | None = None, **variables: str) -> Finished:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        try:
            with _settings(prefect_api):
                return _run_main(args, home, monkeypatch, capfd)
        finally:
            logging.getLogger("kvpolicy").handlers.clear()  # it writes to what capfd takes away

    return run


@pytest.fixture
def kvp_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that needs neither a model nor Prefect, in this process."""

    def run(*args: str, home: Path | None = None) -> Finished:
        return _run_main(args, home, monkeypatch, capsys)

    return run


def _run_main(
    args: tuple[str, ...], home: Path | None, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
) -> Finished:
    from flows.cli import main

    monkeypatch.setattr(sys, "argv", ["kvp", *args, *(() if home is None else ("--home", str(home)))])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capture.readouterr()
    code = ended.value.code
    return Finished(code=code if isinstance(code, int) else 1, stdout=said.out, stderr=said.err)
