"""The command `kvp watch`: a pipeline for every model that is new, once, whoever else is watching."""

import json
import shutil
import time
from pathlib import Path

import pytest
from outcomes import assert_refused, catalog
from processes import environment, run_command, start_process, stop_process, tail

from flows.watch import LOCK
from storage.home import Home, exclusive
from tests.mlflow_models import log_transformers
from tests.tiny_gguf import write_tiny_gguf

SMALL = (
    "--preset",
    "smoke",
    "--settle",
    "0.2",
    *("--set", 'prompts.tasks=["niah_single_1"]'),
    *("--set", "prompts.length_tokens=1200"),
    *("--set", "train.num_steps=6"),
    *("--set", 'evaluate.methods=["kvp"]'),
    *("--set", "evaluate.budgets=[64]"),
    *("--set", "evaluate.num_generated=0"),
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def own_cache(embedded_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del embedded_model_folder  # it is found in the usual cache before that is changed
    monkeypatch.setenv("KVP_CACHE", str(tmp_path / "cache"))


def said(finished) -> list[dict[str, str]]:
    assert finished.code == 0, finished.stderr
    return json.loads(finished.stdout)["sightings"]


def trained_models(home: Path) -> list[str]:
    """Digests of the models that a policy set was trained for, one a policy set."""
    sets = {(row["policy_set_id"], row["model_digest"]) for row in catalog(home).rows("heads")}
    return [digest for _, digest in sorted(sets)]


@pytest.mark.slow
def test_a_new_model_ends_with_a_champion_and_a_second_look_does_nothing(kvp_here, home, models):
    gguf = write_tiny_gguf(models / "tiny.gguf", positions=2048)
    Home.open(home)
    before = sorted(home.rglob("*"))
    (would,) = said(kvp_here("watch", "--source", f"folder:{models}", *SMALL, "--dry-run", "--json", home=home))
    assert (would["reference"], would["outcome"]) == (str(gguf), "found")
    assert "retrain started with the preset smoke" in would["reason"]
    assert sorted(home.rglob("*")) == before

    (done,) = said(kvp_here("watch", "--source", f"folder:{models}", *SMALL, "--json", home=home))
    assert (done["reference"], done["outcome"], done["reason"]) == (str(gguf), "started", "")
    assert trained_models(home) == [done["model_digest"]]
    (decision,) = catalog(home).rows("promotions")
    assert (decision["model_digest"], decision["decision"]) == (done["model_digest"], "promoted")
    num_runs = len(catalog(home).rows("runs"))

    again = kvp_here("watch", *SMALL, home=home, KVP_WATCH=f" folder:{models},")
    assert (again.code, again.stdout) == (0, "nothing new\n"), again.stderr
    assert len(catalog(home).rows("runs")) == num_runs
    assert [row["outcome"] for row in catalog(home).rows("watched")] == ["found", "started"]


@pytest.mark.slow
def test_a_new_version_in_mlflow_s_registry_ends_with_a_champion(kvp_here, home, tiny_model_folder):
    logged = tiny_model_folder("llama", num_hidden_layers=1, max_position_embeddings=2048)
    assert log_transformers(Home.open(home), logged, "tiny llama") == "1"
    asked = ("watch", "--source", "mlflow:tiny llama", *SMALL, "--json")
    (would,) = said(kvp_here(*asked, "--dry-run", home=home))
    assert (would["reference"], would["outcome"]) == ("models:/tiny llama/1", "found")
    (done,) = said(kvp_here(*asked, home=home))
    assert (done["reference"], done["outcome"], done["reason"]) == ("models:/tiny llama/1", "started", "")
    assert trained_models(home) == [done["model_digest"]]
    (model,) = catalog(home).rows("models")
    assert (model["source"], model["digest"]) == ("models:/tiny llama/1", done["model_digest"])
    assert said(kvp_here(*asked, home=home)) == []

    settings = [option for option in SMALL if option not in ("--settle", "0.2")]
    again = kvp_here("run", "--model", "models:/tiny llama/1", *settings, "--json", home=home)
    assert again.code == 0, again.stderr
    assert all(stage["skipped"] for name, stage in json.loads(again.stdout)["stages"].items() if name != "prepare")
    assert_refused(
        kvp_here("run", "--model", "models:/tiny llama/2", *settings, home=home), "no models:/tiny llama/2 in"
    )
    stale = kvp_here("stale", "--json", home=home)
    assert (stale.code, json.loads(stale.stdout)) == (0, []), stale.stderr


@pytest.mark.slow
def test_a_pipeline_that_fails_is_told_and_the_next_model_still_has_its_turn(kvp_here, home, models):
    write_tiny_gguf(models / "a-short.gguf", positions=256)  # supported, but its prompts do not fit
    write_tiny_gguf(models / "b-long.gguf", positions=2048, seed=1)
    finished = kvp_here("watch", "--source", f"folder:{models}", *SMALL, "--json", home=home)
    assert finished.code == 1
    short, long = json.loads(finished.stdout)["sightings"]
    assert (short["outcome"], long["outcome"]) == ("failed", "started")
    assert "position" in short["reason"] and "\n" not in short["reason"]
    assert trained_models(home) == [long["model_digest"]]


def test_while_another_watcher_is_at_work_nothing_is_looked_at(kvp_here, home, models):
    write_tiny_gguf(models / "tiny.gguf")
    with exclusive(Home.open(home), LOCK):
        finished = kvp_here("watch", "--source", f"folder:{models}", *SMALL, home=home)
    assert finished.code == 0
    assert finished.stdout == f"another watcher is at work in {home}: nothing was looked at\n"
    assert catalog(home).rows("watched") == []


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ((), ("--source", "KVP_WATCH")),
        (("--source", "./models"), ("'./models'", "folder:PATH")),
        (("--source", "folder:/x", "--source", "hub:name"), ("'hub:name'", "hub:owner/name")),
        (("--source", "mlflow:models:/name/1"), ("'mlflow:models:/name/1'", "NAME@ALIAS")),
        (("--source", "folder:/x", "--preset", "huge"), ("'huge'", "smoke, demo")),
        (("--source", "folder:/x", "--set", "evaluate.nothing=1"), ("nothing",)),
        (("--source", "folder:/x", "--settle", "-1"), ("--settle",)),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_made(kvp_here, home, args, parts):
    for more in ((), ("--dry-run",)):
        assert_refused(kvp_here("watch", *args, *more, home=home), *parts)
        assert not home.exists()


def test_a_dry_run_makes_no_home(kvp_here, home, models):
    assert_refused(kvp_here("watch", "--source", f"folder:{models}", "--dry-run", home=home), f"no home at {home}")
    assert not home.exists()


def test_a_missing_folder_is_recorded_and_is_no_crash(kvp_here, home, tmp_path):
    for _ in range(2):
        finished = kvp_here("watch", "--source", f"folder:{tmp_path / 'gone'}", *SMALL, "--json", home=home)
        assert finished.code == 1
        assert finished.stderr == ""
        (sighting,) = json.loads(finished.stdout)["sightings"]
        assert sighting["outcome"] == "failed" and "gone cannot be looked at" in sighting["reason"]
    assert len(catalog(home).rows("watched")) == 1


@pytest.mark.slow
def test_two_watchers_at_once_start_one_pipeline(server_environment, home, models, tmp_path):
    gguf = write_tiny_gguf(models / "tiny.gguf", positions=2048)
    shutil.copy(gguf, models / "copy.gguf")
    env = environment(**{**server_environment, "KVP_CACHE": str(tmp_path / "cache")})
    command = ["kvp", "watch", "--source", f"folder:{models}", *SMALL, "--json", "--home", str(home)]
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    processes = [start_process(command, log=log, env=env) for log in logs]
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=240) == 0, tail(log)
    finally:
        for process in processes:
            stop_process(process)
    assert len(trained_models(home)) == 1
    assert [row["outcome"] for row in catalog(home).rows("watched")].count("started") == 1
    runs = catalog(home).rows("runs")
    assert [row["stage"] for row in runs].count("collect") == 1, [row["stage"] for row in runs]


@pytest.mark.slow
def test_a_watcher_that_was_killed_goes_on_where_it_was(server_environment, home, models, tmp_path):
    write_tiny_gguf(models / "tiny.gguf", positions=2048)
    env = environment(**{**server_environment, "KVP_CACHE": str(tmp_path / "cache")})
    command = ["kvp", "watch", "--source", f"folder:{models}", *SMALL, "--json", "--home", str(home)]
    process = start_process(command, log=tmp_path / "killed.log", env=env)
    try:
        deadline = time.monotonic() + 240
        while not (home / "home.json").exists() or not catalog(home).rows("runs", "stage = 'collect'"):
            assert process.poll() is None and time.monotonic() < deadline, tail(tmp_path / "killed.log")
            time.sleep(0.1)
    finally:
        process.kill()
        stop_process(process)
    assert [row["outcome"] for row in catalog(home).rows("watched")] == ["found"]
    collected = catalog(home).rows("runs", "stage = 'collect' AND outcome = 'completed'")
    finished = run_command(command, env=env, timeout_s=240)
    (sighting,) = said(finished)
    assert sighting["outcome"] == "started"
    assert catalog(home).rows("runs", "stage = 'collect' AND outcome = 'completed'") == collected
    assert trained_models(home) == [sighting["model_digest"]]
    assert [row["outcome"] for row in catalog(home).rows("watched")] == ["found", "started"]
