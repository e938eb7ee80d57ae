"""Every command of the pages: it is one that there is, with options that there are, and it does what it says.

Commands run on a home that a small run has made, with that run's tiny model and small settings before their own. What
needs services, a cluster or the network is run by a test of its own, which is named here.
"""

import re
import shutil
from random import Random

import pytest
import typer
from documented import ROOT, DocumentedCommand, documented_commands
from outcomes import catalog

from flows.cli import app
from tests.kvpolicy.benchmarks.written_files import oasst2_trees, write_lines
from tests.kvpolicy.benchmarks.written_ruler_texts import prose, write_squad
from tests.tiny_gguf import write_tiny_gguf

COMMANDS = documented_commands()
PIPELINES = ("run", "collect", "train", "evaluate", "ablate", "watch")
# A command that begins so -> the test that runs it, and what is found in its file.
ELSEWHERE = {
    "kvp up": ("tests/flows/test_services.py", '"up"'),
    "kvp down": ("tests/flows/test_services.py", '"down"'),
    "kvp status": ("tests/flows/test_services.py", '"status"'),
    "kvp dashboard": ("tests/flows/test_dashboard_browser.py", '"dashboard"'),
    "kvp generate": ("tests/flows/test_generate_command.py", "documented_commands()"),
    "kvp openlineage --send": ("tests/flows/test_lineage_commands.py", '"--send"'),
    "kvp run --tasks dialogue --data oasst2=hub:": ("tests/kvpolicy/benchmarks/test_sources.py", "hub:"),
    "kvp run --model owner/name@revision": ("tests/kvpolicy/models/test_reference.py", "@"),
    "kvp run --model models:/assistant/1": ("tests/tasks/test_registered_models.py", "models:/"),
    "kvp watch --source folder:~/models --source hub:": ("tests/tasks/test_watch.py", '"hub:owner/name"'),
    "kvp watch --home lab --source mlflow:": ("tests/tasks/test_registered_models.py", "mlflow:"),
    "kvp run --preset paper --runner ray --runner-address": ("tests/flows/test_runners.py", '"--runner-address"'),
    "mlflow ui": ("tests/flows/test_mlflow_ui.py", '"ui"'),
    "prefect deployment run watch-models/": ("tests/flows/test_watch_deployment.py", "watch-models/watch-models"),
    "prefect deployment run": ("tests/flows/test_deployment.py", "retrain/retrain"),
    "prefect work-pool": ("tests/flows/test_deployment.py", '"work-pool"'),
    "prefect work-queue": ("tests/flows/test_deployment.py", '"work-queue"'),
    "prefect deploy": ("tests/flows/test_deployment.py", '"deploy"'),
    "prefect worker": ("tests/flows/test_deployment.py", '"worker"'),
    "createdb": ("tests/postgresql.py", "CREATE DATABASE"),
    "pip install": ("Makefile", "pip install"),
}
# Of the reader's own, which the page has just made: what they are told who have not.
READERS_OWN = {
    "half_norm": "'half_norm' is unknown",
    "value_norm": "'value_norm' is unknown",  # tests/flows/test_packages.py has it
    "colour_of": "unknown task 'colour_of'",
}
NOT_RUN = ("docs/claims.md",)  # hours of work, whose figures are there; they are only read


def _runs_here(command: DocumentedCommand) -> bool:
    return command.words[0] == "kvp" and _elsewhere(command) is None and command.page not in NOT_RUN


def _elsewhere(command: DocumentedCommand) -> tuple[str, str] | None:
    text = " ".join(command.words)
    return next((place for start, place in ELSEWHERE.items() if text.startswith(start)), None)


def _name(command: DocumentedCommand) -> str:
    return f"{command.page} {' '.join(command.words)}"[:90]


@pytest.mark.parametrize("command", COMMANDS, ids=_name)
def test_a_documented_command_is_one_that_there_is(command):
    program, *words = command.words
    if program == "kvp":
        found = typer.main.get_command(app)
        while hasattr(found, "commands"):
            found, *words = found.commands[words[0]], *words[1:]
        found.make_context(found.name, list(words))  # raises what the reader would be told
    elif program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program != "export":
        assert _elsewhere(command) is not None


@pytest.mark.parametrize(("place", "text"), sorted(set(ELSEWHERE.values())))
def test_what_is_run_elsewhere_is(place, text):
    assert text in (ROOT / place).read_text()


@pytest.fixture(scope="module")
def world(small_run, tmp_path_factory):
    """A folder with what the pages take to be there, and a home."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(small_run.home, folder / "lab")
    model = small_run.options[small_run.options.index("--model") + 1]
    shutil.copytree(model, folder / "my-model")
    write_tiny_gguf(folder / "my-model.gguf", positions=2048)
    (folder / "models").mkdir()
    write_tiny_gguf(folder / "models" / "other.gguf", positions=2048, seed=1)
    (folder / "book.txt").write_text(prose(4000, Random(0)))
    write_squad(folder / "dev-v2.0.json")
    write_lines(folder / "trees.jsonl", oasst2_trees())
    shutil.copy(ROOT / "README.md", folder)
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    return folder


@pytest.fixture(scope="module")
def challenged(small_run, kvp, tmp_path_factory):
    """Homes of one model for those who decide: with a challenger that was not promoted, and with one that was."""
    homes = {name: tmp_path_factory.mktemp(name) / "lab" for name in ("promote", "rollback")}
    shutil.copytree(small_run.home, homes["promote"])
    assert kvp("run", *small_run.options, "--seed", "1", home=homes["promote"]).code == 0
    shutil.copytree(homes["promote"], homes["rollback"])
    assert kvp("promote", home=homes["rollback"]).code == 0
    return homes


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if _runs_here(command)], ids=_name)
def test_a_documented_command_does_what_it_says(
    command, world, challenged, small_run, kvp, kvp_here, s3_url, tmp_path, monkeypatch
):
    monkeypatch.chdir(world)
    words, home = list(command.words[1:]), world / "lab"
    if words[0] in challenged:
        home = shutil.copytree(challenged[words[0]], tmp_path / "lab")
    if "--home" in words:
        at = words.index("--home")
        del words[at : at + 2]
    if "--traces" in words:  # only at the first command of a home
        words[words.index("--traces") + 1] = s3_url
        home = world / s3_url.rpartition("/")[2]
    if words[0] in PIPELINES:
        options = [*small_run.options, *(["--runner-workers", "2"] if "--runner" in words else [])]
        if words[0] == "watch":
            options = _without(options, "--model", "--tasks", "--methods")
        if words[0] == "watch" or "./my-model.gguf" in words:
            options += ["--set", "prompts.length_tokens=1800"]  # these models have a token a letter
        words[1:1] = options
    if words[:2] == ["traces", "export"]:  # of a home that has but one collection by now
        words += ["--collection", _collection(small_run)]
    words = [_present(word, words, world, small_run) for word in words]
    # A pool of processes gets a process for itself: it is told of the server by the environment alone.
    finished = kvp(*words, home=home, timeout_s=280) if "--runner" in words else kvp_here(*words, home=home)
    told = next((told for own, told in READERS_OWN.items() if own in str(command)), None)
    if told is None:
        assert finished.code == 0, finished.stderr
    else:
        assert finished.code == 1
        assert told in finished.stderr


def _without(options, *names):
    places = {place for name in names for at in [options.index(name)] for place in (at, at + 1)}
    return [option for place, option in enumerate(options) if place not in places]


def _present(word, words, world, small_run):
    """What stands in a page for an id, a preset or a place, as it is here."""
    document = small_run.document
    runs = {row["stage"]: row["run_id"] for row in catalog(small_run.home).rows("runs", "outcome = 'completed'")}
    evaluation = document["evaluation"]["id"]
    if words[0] in ("rerun", "diff"):
        known = {"RUN": runs["collect-fragment"], "3f2a9c": runs["collect-fragment"], "81b04e": runs["evaluate-shard"]}
    else:
        known = dict.fromkeys(("RUN", "ID", "EVALUATION", "3f2a9c"), evaluation)
    known |= dict.fromkeys(("demo", "study", "paper"), "smoke")
    known |= dict.fromkeys(("model-7b7c3f2e0126c28d", "model-7b7c3f2e"), document["model"]["id"])
    known |= {"policy_set-3f2a9c": document["policy_set"]["id"], "folder:~/models": f"folder:{world / 'models'}"}
    if words[:2] == ["traces", "show"]:
        known["3f2a"] = _collection(small_run)
    return known.get(word, word)


def _collection(small_run):
    return catalog(small_run.home).rows("samples")[0]["collection"][:8]
