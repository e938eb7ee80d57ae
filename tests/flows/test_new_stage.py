"""The page on new stages, followed on a copy of the tree: three files, and everything else knows the stage."""

import json
import re

import pytest
from outcomes import catalog
from processes import CHECKOUT
from sources import copied_sources

from tasks.framework.wholeness import check_files, declare_kind
from tasks.framework.work import Work, checked
from tasks.prompts import PromptsWork

PAGE = CHECKOUT / "docs" / "how-to" / "new-stage.md"
BEFORE_CLASS = "@dataclass(frozen=True, kw_only=True)\nclass PipelineConfig"
LAST_FIELD = "    ablate: AblateConfig = field(default_factory=AblateConfig)\n"
SETTINGS = "from kvpolicy.config.settings import "
FLOW = '    "evaluate": (EvaluationWork,),\n'
FIRST_IMPORT = "from tasks.prompts import"


def _replace(path, before, after):
    text = path.read_text()
    assert text.count(before) == 1, (path, before)
    path.write_text(text.replace(before, after))


@pytest.fixture
def sources(tmp_path):
    """A copy of the product that has the page's stage."""
    settings, field, stage, imported, flow = re.findall(r"```python\n(.+?)```", PAGE.read_text(), flags=re.DOTALL)
    place = copied_sources(tmp_path)
    _replace(place / "kvpolicy" / "presets" / "pipeline_config.py", BEFORE_CLASS, f"{settings}\n\n{BEFORE_CLASS}")
    _replace(place / "kvpolicy" / "presets" / "pipeline_config.py", SETTINGS, f"{SETTINGS}Positive, ")
    _replace(place / "kvpolicy" / "presets" / "pipeline_config.py", LAST_FIELD, f"{LAST_FIELD}{field}")
    (place / "tasks" / "lengths.py").write_text(stage)
    _replace(place / "flows" / "stages.py", FIRST_IMPORT, f"{imported}{FIRST_IMPORT}")
    _replace(place / "flows" / "stages.py", FLOW, flow)
    return place


@pytest.mark.slow  # two pipelines and five commands, each a process
@pytest.mark.timeout(600)
def test_a_stage_of_three_files_is_run_shown_found_checked_and_repeated(kvp, small_run, sources, tmp_path):
    home, with_stage = tmp_path / "home", {"PYTHONPATH": str(sources)}
    options = (*small_run.options, "--set", "lengths.samples_per_part=1")

    def ask(*command: str) -> str:
        finished = kvp(*command, home=home, **with_stage)
        assert finished.code == 0, finished.stderr
        return finished.stdout

    shown = kvp("run", *options, home=home, **with_stage)
    assert shown.code == 0, shown.stderr
    assert re.search(r"count lengths (\d+)/\1", shown.stderr.splitlines()[-1])
    samples = len({row["sample_id"] for row in catalog(home).rows("samples", "split = 'test'")})
    runs = catalog(home).rows("runs", "outcome = 'completed'")
    assert [row["stage"] for row in runs].count("count-lengths") == samples
    (whole,) = (row for row in runs if row["stage"] == "lengths")

    ask("run", *options)
    skipped = catalog(home).rows("runs", "stage = 'lengths' AND outcome = 'skipped'")
    assert [row["reused_run_id"] for row in skipped] == [whole["run_id"]]
    assert "test, " in ask("lineage", whole["run_id"])  # the prompts that it read
    assert json.loads(ask("stale", "--json")) == []
    for stage in ("lengths", "count-lengths"):
        (run, *_) = (row["run_id"] for row in runs if row["stage"] == stage)
        assert json.loads(ask("rerun", run, "--json"))["identical"]

    with (sources / "tasks" / "lengths.py").open("a") as stream:
        stream.write("\nCHANGED = 1\n")
    assert {(row["stage"], row["kind"], row["name"]) for row in json.loads(ask("stale", "--json"))} == {
        ("lengths", "code", "tasks.lengths")
    }
    lengths = home / "lengths"
    for path in lengths.iterdir():
        path.write_bytes(b"nothing")
    damaged = {row["kind"] for row in json.loads(ask("stale", "--json")) if row["stage"] == "lengths"}
    assert damaged == {"code", "result"}


def test_what_declarations_lack_is_named_together():
    nameless, second = type("Nameless", (Work,), {}), type("Second", (Work,), {"name": "prompts", "result": "prompts"})
    with pytest.raises(TypeError) as caught:
        checked([PromptsWork, nameless, second])
    lacking = ("stage", "planned", "recorded", "finish")
    for problem in (
        *("Nameless declares no name", "Nameless declares no result"),
        *(f"{name} declares no {method}" for name in ("Nameless", "Second") for method in lacking),
        "Second declares 'prompts', which another one does",
    ):
        assert problem in str(caught.value)


def test_a_kind_of_artifact_is_declared_once():
    with pytest.raises(ValueError, match="'prompts' are declared twice"):
        declare_kind("prompts", check_files())
