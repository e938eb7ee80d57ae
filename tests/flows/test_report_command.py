"""`kvp report`: files that it writes, what they say of a real pipeline, and what it refuses in one line."""

import re

import pytest

from dashboards.report.comparing import objective_comparisons, task_comparisons
from dashboards.report.evaluation_rows import read_report_rows
from storage.catalog.catalog import Catalog
from storage.home import Home
from tests.dashboards.report_home import BUDGETS, EVALUATION, FIDELITY, TASKS, make_home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    made = Home.open(tmp_path_factory.mktemp("planted") / "home")
    make_home(made)
    return made


def test_a_page_and_markdown_are_written_where_they_are_wanted(kvp_alone, home, tmp_path):
    out = tmp_path / "new" / "folder"
    done = kvp_alone("report", EVALUATION.artifact_id[:20], "--out", str(out), home=home.path)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(out / "report.html"), str(out / "report.md")]
    told = (out / "report.md").read_text()
    assert "kvp beats every baseline at 1 of 3 budgets: not at 64 tokens (snapkv) and 128 tokens (h2o)." in told
    assert "Within single tasks nothing is established: they have 4 samples" in told
    assert "Objectives with the evaluated policies' options" in told
    assert not (home.figures / EVALUATION.artifact_id).exists()


@pytest.mark.parametrize(
    ("run", "options", "said"),
    [
        ("unknown-run", (), "no artifact, run or MLflow run 'unknown-run' in the catalog"),
        ("policy_set", (), "may mean 3 things"),
        ("trace_snapshot", (), "belongs to no single evaluation: name one of evaluation-"),
        ("evaluation-", ("--out", "/proc/nowhere"), "cannot write /proc/nowhere: "),
        ("evaluation-", ("--out", __file__), f"cannot write {__file__}: File exists; choose another --out"),
    ],
)
def test_what_cannot_be_is_one_line(kvp_alone, home, run, options, said):
    done = kvp_alone("report", run, *options, home=home.path)
    assert done.code == 1 and done.stdout == ""
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_a_home_that_is_not_there_is_one_line(kvp_alone, tmp_path):
    done = kvp_alone("report", "evaluation", home=tmp_path / "none")
    assert done.code == 1 and "no home at" in done.stderr and done.stderr.count("\n") == 1


def test_differences_within_a_task_are_those_of_its_scores(home):
    """Every sample of a task has the planted score, so a difference is exact: its interval over samples has no width.

    Only what kvp's two seeds differ by remains, a fiftieth of its value to either side.
    """
    catalog = Catalog(home)
    rows = list(task_comparisons(catalog, read_report_rows(catalog, EVALUATION.artifact_id)))
    assert {row["task"] for row in rows} == set(TASKS) and {row["metric"] for row in rows} == {"kl"}
    assert {row["n"] for row in rows} == {4}
    for row in rows:
        place = BUDGETS.index(row["budget"])
        expected = FIDELITY[row["method"]][place] - FIDELITY[row["other"]][place]
        shift = {"niah_single_1": -0.01, "vt": 0.01}[row["task"]]
        expected += shift * ((row["other"] == "full") - (row["method"] == "full"))
        spread = 0.02 * FIDELITY["kvp"][place] if "kvp" in (row["method"], row["other"]) else 0.0
        assert row["difference"] == pytest.approx(expected, abs=1e-12)
        assert row["ci_low"] == pytest.approx(expected - spread, abs=1e-9)
        assert row["ci_high"] == pytest.approx(expected + spread, abs=1e-9)
        assert row["verdict"] == "undecided"  # four samples, however they agree


def test_objectives_are_compared_where_nothing_else_differs(home):
    catalog = Catalog(home)
    read = read_report_rows(catalog, EVALUATION.artifact_id)
    rows = objective_comparisons(catalog, read)
    assert {row.objective: row.num_seeds for row in rows} == {"exact": 1, "mse": 1}
    assert {training.objective for training in read.trainings} == {"exact"}
    for row in rows:  # the planted costs are alike
        assert row.cost.mean == pytest.approx(1.35)
        assert (row.difference.mean, *row.difference.ends, row.heads_better) == (0.0, 0.0, 0.0, 0.0)


def test_a_real_pipeline_s_report_claims_what_its_catalog_says(kvp_here, small_run, tmp_path):
    evaluation = small_run.document["evaluation"]["id"]
    done = kvp_here("report", evaluation, "--out", str(tmp_path), home=small_run.home)
    assert (done.code, done.stderr) == (0, "")
    told = (tmp_path / "report.md").read_text()
    rows = Catalog(Home.open(small_run.home)).rows("comparisons", f"evaluation_id = '{evaluation}' AND metric = 'kl'")
    rivals = [row for row in rows if row["method"] == "kvp" and row["is_contest"] and row["other"] != "kvp_heads"]
    assert rivals
    for setting in {row["setting"] for row in rivals}:
        own = [row for row in rivals if row["setting"] == setting]
        budgets = {row["budget"] for row in own}
        won = budgets - {row["budget"] for row in own if row["verdict"] != "better"}
        start = f"ruler, {setting.replace('_', '-')}, fidelity (KL): kvp beats every baseline at "
        (line,) = {line for line in re.findall(r"^(?:- )?(.*)$", told, re.MULTILINE) if line.startswith(start)}
        expected = {0: f"none of {len(budgets)} budgets:", len(budgets): "every budget,"}.get(
            len(won), f"{len(won)} of {len(budgets)} budgets:"
        )
        assert line.startswith(start + expected)
    assert (tmp_path / "report.html").stat().st_size < 6_000_000
