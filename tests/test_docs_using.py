"""The Python of the README and of docs/using.md that uses a policy, run as it stands, with the embedded model."""

import re
import shutil
from pathlib import Path

import pytest

from kvpolicy import Generation, load_model
from storage.catalog.catalog import Catalog
from storage.home import Home
from tasks.inputs.trained import save_trained
from tests.drawn_policy import draw_policy

ROOT = Path(__file__).resolve().parent.parent
README = "kvpolicy learns which entries of a cache to keep. " * 40


@pytest.fixture(scope="module")
def reader(embedded_model_folder, tmp_path_factory):
    """A folder as a reader has it after a run: a README, and a home with a champion (of untrained agents)."""
    model = load_model(str(embedded_model_folder))
    policy = draw_policy(model)
    folder = tmp_path_factory.mktemp("reader")
    (folder / "README.md").write_text(README)
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    home = Home.open(folder / ".kvp")
    catalog = Catalog(home)
    artifact = save_trained(home, policy, "untrained", kind="policy_set")
    champion = catalog.register(artifact)
    with catalog.record_run(
        stage="promote", stage_key="0" * 64, parameters={}, inputs={}, code_fingerprint="0" * 64
    ) as run:
        decision = {
            "model_digest": model.digest,
            "kind": "manual",
            "decision": "promoted",
            "challenger_id": champion,
            "champion_before_id": "",
            "champion_id": champion,
            "evaluation_id": "",
            "setting": "",
            "reason": "because",
        }
        run.append("promotions", [decision])
    return folder


def _programs(page: str, *, part: str = "") -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(r"```python\n(.+?)```", text[text.index(part) :], flags=re.DOTALL)


def _run(programs, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, "page", "exec"), names)
    return names


def test_the_example_of_the_readme_runs(reader, monkeypatch, capsys):
    program, *_ = _programs("README.md", part="## Use a policy")
    answer = _run([program], reader, monkeypatch)["answer"]
    assert isinstance(answer, Generation)
    assert answer.num_kept_tokens == 64 < answer.num_prompt_tokens
    assert capsys.readouterr().out == f"{answer.text} {answer.num_prompt_tokens} 64 {answer.cache_bytes}\n"


@pytest.mark.slow
def test_the_examples_of_the_page_run_one_after_the_other(reader, monkeypatch, capsys):
    programs = [program for program in _programs("docs/using.md") if "kvpress" not in program]
    assert len(programs) == 4
    names = _run(programs, reader, monkeypatch)
    one, full, answers = names["answer"], names["full"], names["answers"]
    assert full.num_evicted_tokens == 0 < one.num_evicted_tokens
    assert [answer.num_evicted_tokens for answer in answers] == [0, 0]
    assert names["policy"].model_digest == names["model"].digest
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"{full.cache_bytes / one.cache_bytes} ")
