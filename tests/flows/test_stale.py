"""What is stale and why: code, presets, texts and models that changed since, and what was lost."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from outcomes import catalog
from sources import copied_sources, documented

PROMPTS = {"prompts train", "prompts validation", "prompts test"}
TRAIN = "train seed 0"
Causes = dict[str, set[tuple[str, str]]]


def causes(finished: Any) -> Causes:
    """Stage -> kind and name of every cause."""
    assert finished.code == 0, finished.stderr
    found: Causes = {}
    for row in json.loads(finished.stdout):
        assert set(row) == documented("kvp stale")
        assert row["recorded"] != row["now"]
        found.setdefault(row["stage"], set()).add((row["kind"], row["name"]))
    return found


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def append(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text()}\n{line}\n")


def files(home: Path) -> dict[Path, int]:
    """Every file of a home but Prefect's, with the time of its last change."""
    found = (path for path in home.rglob("*") if path.is_file() and path.relative_to(home).parts[0] != "prefect")
    return {path: path.stat().st_mtime_ns for path in found}


def test_nothing_is_stale_and_nothing_is_written(kvp_here, small_run):
    before = files(small_run.home)
    assert kvp_here("stale", home=small_run.home).stdout == "nothing is stale\n"
    assert kvp_here("stale", "--json", home=small_run.home).stdout == "[]\n"
    assert files(small_run.home) == before


def test_what_changes_no_result_makes_nothing_stale(kvp, small_run, tmp_path):
    sources = copied_sources(tmp_path)
    for name in (
        "flows/display/summary.py",
        "flows/cli.py",
        "dashboards/figures/curve_picture.py",
        "storage/tables/views.py",
        "tasks/framework/progress.py",
    ):
        append(sources / name, "CHANGED = 1")
    for name in ("tasks/train.py", "kvpolicy/attention/importance.py", "kvpolicy/methods/knorm.py"):
        append(sources / name, "# a remark")
    change(sources / "kvpolicy" / "training" / "policy_training.py", '"""Training ', '"""Another docstring. Training ')
    (sources / "README.md").write_text("another text")
    # A method and an objective that are new, and what was not chosen.
    methods, objectives = sources / "kvpolicy" / "methods", sources / "kvpolicy" / "objectives"
    (methods / "newest.py").write_text(
        (methods / "knorm.py").read_text().replace("class KNorm", "class Newest").replace('"knorm"', '"newest"')
    )
    change(methods / "registry.py", "    H2O,\n", "    H2O,\n    Newest,\n")
    change(methods / "registry.py", "\n_OWN", "from kvpolicy.methods.newest import Newest\n\n_OWN")
    append(methods / "pyramidkv.py", "CHANGED = 1")
    change(objectives / "registry.py", '"mse": mse_loss,', '"mse": mse_loss, "newest": mse_loss,')
    append(objectives / "rloo.py", "CHANGED = 1")
    assert causes(kvp("stale", "--json", home=small_run.home, PYTHONPATH=str(sources))) == {}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (
            "kvpolicy.training.policy_training",
            {TRAIN: {("code", "kvpolicy.training.policy_training")}, "evaluate": {("input", "policy_0")}},
        ),
        # The others take a process each as well.
        pytest.param(
            "kvpolicy.methods.knorm", {"evaluate": {("code", "kvpolicy.methods.knorm")}}, marks=pytest.mark.slow
        ),
        pytest.param(
            "kvpolicy.attention.importance",
            {
                "collect": {("code", "kvpolicy.attention.importance")},
                TRAIN: {("input", "snapshot")},
                "evaluate": {("code", "kvpolicy.attention.importance"), ("input", "policy_0")},
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "kvpolicy.benchmarks.ruler.words",
            {
                **{stage: {("code", "kvpolicy.benchmarks.ruler.words")} for stage in PROMPTS},
                "collect": {("input", "prompts_train"), ("input", "prompts_validation")},
                TRAIN: {("input", "snapshot")},
                "train-soft-tokens seed 0": {("input", "prompts")},
                "evaluate": {
                    ("code", "kvpolicy.benchmarks.ruler.words"),
                    ("input", "prompts"),
                    ("input", "policy_0"),
                    ("input", "soft_tokens_0"),
                },
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else "",
)
def test_a_module_that_changed_makes_stale_what_runs_it(kvp, small_run, tmp_path, module, expected):
    sources = copied_sources(tmp_path)
    append(sources / f"{module.replace('.', '/')}.py", "CHANGED = 1")
    assert causes(kvp("stale", "--json", home=small_run.home, PYTHONPATH=str(sources))) == expected


@pytest.mark.slow  # as the others, a process
def test_modules_that_came_and_went_are_named(kvp, small_run, tmp_path):
    sources = copied_sources(tmp_path)
    (sources / "kvpolicy" / "schedules.py").write_text('"""Another module."""\n')
    change(
        sources / "kvpolicy" / "training" / "policy_training.py",
        "import copy\n",
        "import copy\nimport kvpolicy.schedules\n",
    )
    rows = json.loads(kvp("stale", "--json", home=small_run.home, PYTHONPATH=str(sources)).stdout)
    came = next(row for row in rows if row["name"] == "kvpolicy.schedules")
    assert (came["stage"], came["kind"], came["recorded"]) == (TRAIN, "code", None)
    assert re.fullmatch("[0-9a-f]{64}", came["now"])


@pytest.fixture
def another_preset(tmp_path) -> str:
    """Sources whose preset trains for longer."""
    sources = copied_sources(tmp_path)
    change(sources / "kvpolicy" / "presets" / "smoke.toml", "num_steps = 12", "num_steps = 13")
    return str(sources)


def test_a_parameter_that_the_preset_changed_is_named(kvp, small_run, another_preset):
    finished = kvp("stale", "--json", home=small_run.home, PYTHONPATH=another_preset)
    assert causes(finished) == {TRAIN: {("parameter", "train.num_steps")}, "evaluate": {("input", "policy_0")}}
    first, second = json.loads(finished.stdout)
    assert (first["recorded"], first["now"]) == (12, 13)
    assert first["made"].startswith(small_run.document["policy_set"]["id"])
    assert (second["recorded"], second["now"]) == (small_run.document["policy_set"]["id"], f"{TRAIN} is out of date")


@pytest.mark.slow  # a pipeline and a repetition in processes of their own
def test_what_is_stale_is_what_a_run_does_again(kvp, small_run, another_preset, tmp_path):
    home = shutil.copytree(small_run.home, tmp_path / "home")
    stale = causes(kvp("stale", "--json", home=home, PYTHONPATH=another_preset))
    finished = kvp("run", *small_run.options, "--json", home=home, PYTHONPATH=another_preset)
    stages = json.loads(finished.stdout)["stages"]
    assert {name for name, stage in stages.items() if not stage["skipped"]} == {
        "prepare",
        *(name.split()[0] for name in stale),
    }
    assert causes(kvp("stale", "--json", home=home, PYTHONPATH=another_preset)) == {}
    # What the recorded request meant is repeated, not what the preset says now.
    original = small_run.document["policy_set"]["id"]
    finished = kvp("rerun", original, "--json", home=home, PYTHONPATH=another_preset)
    assert finished.code == 0, finished.stderr
    assert json.loads(finished.stdout)["identical"]


def test_another_model_in_its_place_makes_everything_stale(kvp_here, small_run):
    note = Path(small_run.options[-1]) / "note.txt"  # it counts: a tokenizer's vocabulary may be such a file
    note.write_text("a remark")
    try:
        found = causes(kvp_here("stale", "--json", home=small_run.home))
    finally:
        note.unlink()
    assert set(found) == PROMPTS | {"collect", TRAIN, "train-soft-tokens seed 0", "evaluate"}
    assert all(("input", "model") in own for own in found.values())


@pytest.mark.slow
def test_a_lost_result_is_only_made_again(kvp_here, small_run, tmp_path):
    home = shutil.copytree(small_run.home, tmp_path / "home")
    policy = small_run.document["policy_set"]["id"]
    shutil.rmtree(catalog(home).artifact(policy).uri)
    assert causes(kvp_here("stale", "--json", home=home)) == {TRAIN: {("result", policy)}}
    document = json.loads(kvp_here("run", *small_run.options, "--json", home=home).stdout)
    assert [name for name, stage in document["stages"].items() if not stage["skipped"]] == ["prepare", "train"]
    for path in home.glob("traces/fragments/*"):
        shutil.rmtree(path)
    found = causes(kvp_here("stale", "--json", home=home))
    assert set(found) == {"collect"}
    assert {kind for kind, _ in found["collect"]} == {"result"}


def test_a_text_that_changed_or_is_gone_is_named(kvp_here, small_run, tmp_path):
    essay, home = tmp_path / "essay.txt", tmp_path / "home"
    essay.write_text(" ".join(f"Sentence number {index} says nothing of note." for index in range(2000)))
    options = ("--preset", "smoke", "--tasks", "niah_single_2", "--data", f"essays={essay}", *small_run.options[4:])
    assert kvp_here("collect", *options, home=home).code == 0
    assert causes(kvp_here("stale", "--json", home=home)) == {}
    change(essay, "number 7 ", "number seven ")
    text = ("input", f"texts.{essay}")
    renewed = {("input", "prompts_train"), ("input", "prompts_validation")}
    expected = {**{stage: {text} for stage in PROMPTS}, "collect": renewed}
    assert causes(kvp_here("stale", "--json", home=home)) == expected
    essay.unlink()
    found = causes(kvp_here("stale", "--json", home=home))
    assert found == {**{stage: {("input", "texts"), text} for stage in PROMPTS}, "collect": renewed}


def test_a_request_that_found_everything_is_asked_about_too(kvp_here, small_run, tmp_path):
    home = shutil.copytree(small_run.home, tmp_path / "home")
    fewer = ("--methods", "kvp,knorm")
    assert kvp_here("collect", *small_run.options, *fewer, home=home).code == 0
    requests = catalog(home).rows("artifacts", "kind = 'request'")
    assert len(requests) == 2
    (skipped,) = catalog(home).rows("runs", "outcome = 'skipped' AND stage = 'collect'")[-1:]
    edges = catalog(home).rows("edges", f"run_id = '{skipped['run_id']}'")
    assert [(edge["role"], edge["name"], edge["artifact_id"]) for edge in edges] == [
        ("input", "request", requests[-1]["artifact_id"])
    ]
    assert causes(kvp_here("stale", "--json", home=home)) == {}
