"""What the pages say of metrics is what the code defines and logs, and what they point at is there."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import torch

from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.names import MEAN_TASK
from kvpolicy.presets.pipeline_config import load_preset, preset_names
from kvpolicy.results.budget_curves import CurvePoint
from kvpolicy.results.metrics import LOWER_IS_BETTER, METRICS
from kvpolicy.results.statistics import Interval
from kvpolicy.training.policy_training import StepRecord
from tasks.curve_runs import _metrics
from tasks.train import _plain, _training_curves

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text()


def _table() -> dict[str, tuple[str, str]]:
    """Metric -> which side is better, meaning."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", METRICS_PAGE, flags=re.MULTILINE)
    return {name: (better, meaning) for name, better, meaning in rows}


def _paragraph(start: str) -> str:
    (found,) = (part for part in METRICS_PAGE.split("\n\n") if part.startswith(start))
    return found


def test_the_page_defines_the_metrics_that_there_are():
    assert list(_table()) == list(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_the_page_says_which_side_is_better(name):
    side = "lower" if name in LOWER_IS_BETTER else "higher"
    assert _table()[name][0] == side


@pytest.mark.parametrize("metric", METRICS)
def test_curves_are_logged_under_the_names_of_the_page(metric):
    interval = Interval(mean=0.5, low=0.25, high=0.75, n=4, smallest_stratum=2)
    point = CurvePoint(
        benchmark="ruler",
        setting="query_aware",
        method="kvp",
        seed=0,
        task=MEAN_TASK,
        metric=metric,
        budget=64,
        interval=interval,
    )
    logged = [*_metrics(point), *_metrics(dataclasses.replace(point, task="vt"))]
    patterns = re.findall(r"`([^`]*<name>[^`]*)`", _paragraph("In MLflow"))
    assert sorted(patterns) == ["<task>/<name>", "interval/<name>_high", "interval/<name>_low"]
    expected = {metric, *(pattern.replace("<name>", metric).replace("<task>", "vt") for pattern in patterns)}
    assert {name for name, _, _ in logged} == expected
    values = {name: value for name, _, value in logged}
    assert values[metric] == values[f"vt/{metric}"] == 0.5
    assert (values[f"interval/{metric}_low"], values[f"interval/{metric}_high"]) == (0.25, 0.75)
    assert {budget for _, budget, _ in logged} == {64}  # "`step` is the budget"


def test_training_logs_the_names_of_the_page():
    record = StepRecord(
        step=1,
        loss=0.5,
        train_s=1.0,
        gradient_norm=1.0,
        learning_rate=1e-3,
        heads_at_once=2,
        heldout_cost=torch.ones(2),
    )
    logged = {name for name, _, _ in _training_curves([[_plain(record)]], [2])}
    mentioned = set(re.findall(r"`(\w+)`", _paragraph("Training logs")))
    assert mentioned == logged


def test_intervals_are_what_the_page_says():
    for config in (EvaluateConfig(), *(load_preset(name).evaluate for name in preset_names())):
        assert f"{config.num_resamples:,} resamples" in _paragraph("**Intervals**")
        assert f"{config.confidence * 100:.0f} %" in _paragraph("In MLflow")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_at_is_there(page):
    text = page.read_text()
    linked = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)  # pictures too
    missing = [target for target in linked if not (page.parent / target).exists()]
    named = re.findall(r"`((?:kvpolicy|storage|tasks|flows|dashboards|docs|tests)/[\w./]*)`", text)
    missing += [path for path in named if not (ROOT / path).exists()]
    assert missing == []


def test_the_reference_is_what_the_code_says():
    pages = runpy.run_path(str(ROOT / "docs" / "reference" / "write.py"))["pages"]()
    for name, text in pages.items():
        assert (ROOT / "docs" / "reference" / name).read_text() == text, f"{name} is out of date: run `make docs`"
    assert "| `--budgets` |" in pages["commands.md"]
    assert re.search(r"\| `num_heldout_samples` \| .+ \| 1 \| 2 \| 2 \| 20 \|", pages["configuration.md"])
    assert "| `ci_low` | double |" in pages["tables.md"]
    empty = r"\|\s*\|\s*\|"  # nothing goes without a meaning
    assert not any(re.search(rf"^\| `[^|]+ {empty}", text, flags=re.MULTILINE) for text in pages.values())


def test_the_program_in_the_derivation_runs():
    (program,) = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "method.md").read_text(), flags=re.DOTALL)
    assert program.count("assert ") == 2
    exec(compile(program, "docs/method.md", "exec"), {})
