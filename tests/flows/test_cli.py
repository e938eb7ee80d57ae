"""The command line as a process: one smoke run of the embedded model, and what is asked about it afterwards."""

import csv
import io
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from outcomes import PROGRESS, catalog, points

from flows.runtime.run_options import Choices
from kvpolicy.methods.registry import method_names
from kvpolicy.results.metrics import METRICS
from storage.tables.schemas import TABLES

CONTENDERS = Choices().configure("smoke").evaluate.contenders
DOCS = Path(__file__).parents[2] / "docs"
FREE_NAMES = {"stages", "heldout_cost.by_head", "beats_all[].budgets"}  # their keys are names and numbers


def paths(value: Any, place: str = "") -> set[str]:
    """Paths of all values of a document: `a.b`, `[]` for elements and `*` for free names."""
    if isinstance(value, dict):
        below = ((f"{place}.{'*' if place in FREE_NAMES else key}".lstrip("."), part) for key, part in value.items())
        return set().union(*(paths(part, name) for name, part in below))
    if isinstance(value, list):
        return set().union(*(paths(part, f"{place}[]") for part in value))
    return {place}


def test_the_program_says_its_release():
    printed = subprocess.run(
        [str(Path(sys.executable).with_name("kvp")), "--version"], capture_output=True, text=True, check=True
    )
    release = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["version"]
    assert (printed.stdout, printed.stderr) == (f"kvp {release}\n", "")


def test_the_document_is_what_the_docs_say(smoke_run):
    documented = set(re.findall(r"^\| `([^`]+)` \|", (DOCS / "json.md").read_text(), flags=re.MULTILINE))
    assert paths(smoke_run.document) == documented


def test_standard_output_is_one_document(smoke_run):
    assert smoke_run.finished.stdout.count("\n") == 1
    document = smoke_run.document
    assert document["home"] == str(smoke_run.home)
    assert set(document["stages"]) == {"prepare", "collect", "train", "evaluate"}
    assert not any(stage["skipped"] for stage in document["stages"].values())
    assert len(document["heldout_cost"]["by_head"]) == 90
    assert all(cost >= 1 for cost in document["heldout_cost"]["by_head"].values())
    assert document["heldout_cost"]["mean"] == pytest.approx(sum(document["heldout_cost"]["by_head"].values()) / 90)
    assert {Path(path).suffix for path in document["figures"]} == {".png", ".html"}
    assert all(Path(path).is_file() for path in document["figures"])
    assert Path(document["policy_set"]["path"]).is_dir()


def test_standard_error_is_plain_lines(smoke_run):
    lines = smoke_run.finished.stderr.splitlines()
    assert [line for line in lines if not PROGRESS.match(line)] == []
    assert {line.split()[1] for line in lines} == {"run:", "collect:", "train:", "evaluate:"}


def test_every_method_has_every_point(smoke_run):
    config = Choices(tasks=["niah_single_1"]).configure("smoke")
    expected = itertools.product(
        CONTENDERS,
        ["ruler"],
        [*config.prompts.tasks, "mean"],
        config.evaluate.settings,
        ["kl", "kl_answer", "string_match"],
        config.evaluate.budgets,
        [0],
    )
    assert set(points(smoke_run.document["curves"])) == set(expected)
    assert len(CONTENDERS) == 11
    assert len(config.evaluate.budgets) >= 6
    for row in smoke_run.document["curves"]:
        if row["n"] == 1:  # says nothing about spread
            assert row["ci_low"] is row["ci_high"] is None
        else:
            assert row["ci_low"] <= row["value"] <= row["ci_high"]
        if row["metric"] == "string_match":
            assert 0 <= row["value"] <= 1
        elif row["method"] == "full":
            assert row["value"] == pytest.approx(0, abs=1e-3)
        else:
            assert row["value"] >= 0


def test_metrics_are_documented(smoke_run):
    text = (DOCS / "metrics.md").read_text()
    tabled = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert {row["metric"] for row in smoke_run.document["curves"]} < set(METRICS) <= tabled
    for name in {row["name"] for row in catalog(smoke_run.home).rows("metrics")}:
        assert f"`{name}`" in text


def test_every_table_of_the_catalog_is_filled(smoke_run, small_run):
    for table in set(TABLES) - {"watched"}:  # which `kvp watch` fills
        home = small_run.home if table == "findings" else smoke_run.home  # the preset analyses nothing
        assert catalog(home).rows(table), table


def test_a_home_holds_everything_and_nothing_half_done(smoke_run):
    names = {path.name for path in smoke_run.home.iterdir()}
    rooms = {"prompts", "traces", "policies", "evaluations", "figures", "catalog", "mlflow", "prefect", "locks"}
    assert names == {"home.json", "openlineage", *rooms}
    assert not [path for path in smoke_run.home.glob("policies/*") if path.name.startswith(".")]
    assert (smoke_run.home / "prefect" / "prefect.db").is_file()


def test_mlflow_has_the_points_of_the_curves(smoke_run):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=smoke_run.document["mlflow_tracking_uri"])
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in smoke_run.document["curves"]:
        curves.setdefault(row["mlflow_run_id"], []).append(row)
    assert len(curves) == len(CONTENDERS) * 2
    for run_id, rows in curves.items():
        run = client.get_run(run_id)
        logged = {name for name in run.data.metrics if not name.startswith("interval/")}
        expected: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            name = row["metric"] if row["task"] == "mean" else f"{row['task']}/{row['metric']}"
            expected.setdefault(name, []).append((row["budget"], row["value"]))
        assert logged == set(expected)
        for name in ("kl", "niah_single_1/kl"):
            history = client.get_metric_history(run_id, name)
            assert sorted((point.step, point.value) for point in history) == sorted(expected[name])
        assert run.info.status == "FINISHED"
        assert run.data.tags["kvp.method"] == rows[0]["method"]
        assert run.data.tags["kvp.setting"] == rows[0]["setting"]
        assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["ruler-test"]
    name = f"kvpolicy-SmolLM2-135M-Instruct-{smoke_run.document['model']['digest'][:8]}"
    (version,) = client.search_model_versions(f"name = '{name}'")
    assert version.tags["kvp.policy_set_id"] == smoke_run.document["policy_set"]["id"]


@pytest.mark.parametrize("method", ["kvp", "snapkv"])
def test_the_lineage_of_a_curve_reaches_where_it_came_from(kvp, smoke_run, method):
    run_id = next(row["mlflow_run_id"] for row in smoke_run.document["curves"] if row["method"] == method)
    finished = kvp("lineage", run_id, "--json", home=smoke_run.home)
    graph = json.loads(finished.stdout)
    ids = {node["id"] for node in graph["nodes"]}
    kinds = {node["kind"] for node in graph["nodes"]}
    assert {"model", "prompts", "trace_snapshot", "policy_set", "code", "environment"} <= kinds
    assert smoke_run.document["model"]["id"] in ids
    assert smoke_run.document["policy_set"]["id"] in ids
    assert smoke_run.document["trace_snapshot"]["id"] in ids
    assert {edge["source"] for edge in graph["edges"]} | {edge["target"] for edge in graph["edges"]} <= ids


def test_the_lineage_of_the_model_reaches_what_came_from_it(kvp, smoke_run):
    finished = kvp("lineage", smoke_run.document["model"]["id"], "--down", home=smoke_run.home)
    assert finished.code == 0
    assert smoke_run.document["policy_set"]["id"] in finished.stdout
    assert smoke_run.document["evaluation"]["id"] in finished.stdout


def test_sql_prints_tables_json_and_csv(kvp, smoke_run):
    query = (
        "SELECT method, budget, value FROM curves WHERE task = 'mean' AND metric = 'kl' "
        "AND setting = 'query_agnostic' AND budget = 64 ORDER BY method"
    )
    expected = [
        (row["method"], row["budget"], row["value"])
        for row in sorted(smoke_run.document["curves"], key=lambda row: row["method"])
        if (row["task"], row["metric"], row["setting"], row["budget"]) == ("mean", "kl", "query_agnostic", 64)
    ]
    as_json, as_csv, as_table = (
        kvp("sql", query, "--format", form, home=smoke_run.home) for form in ("json", "csv", "table")
    )
    assert [(row["method"], row["budget"], row["value"]) for row in json.loads(as_json.stdout)] == expected
    header, *rows = csv.reader(io.StringIO(as_csv.stdout))
    assert header == ["method", "budget", "value"]
    assert [(method, int(budget), float(value)) for method, budget, value in rows] == expected
    lines = as_table.stdout.splitlines()
    assert lines[0].split() == ["method", "budget", "value"]
    assert [line.split()[0] for line in lines[1:]] == [method for method, _, _ in expected]
    assert as_json.stderr == as_csv.stderr == as_table.stderr == ""


def test_a_second_run_does_no_work_and_says_so(kvp_here, smoke_run):
    completed = catalog(smoke_run.home).rows("runs", "outcome = 'completed'")
    again = kvp_here("run", *smoke_run.options, "--json", home=smoke_run.home)
    document = json.loads(again.stdout)
    assert [name for name, stage in document["stages"].items() if stage["skipped"]] == ["collect", "train", "evaluate"]
    assert again.stderr == ""
    unchanged = set(document) - {"stages"}
    assert {key: document[key] for key in unchanged} == {key: smoke_run.document[key] for key in unchanged}
    assert catalog(smoke_run.home).rows("runs", "outcome = 'completed'") == completed
    skipped = catalog(smoke_run.home).rows("runs", "outcome = 'skipped'")
    assert {row["stage"] for row in skipped} == {"collect", "train", "evaluate"}
    assert {row["reused_run_id"] for row in skipped} <= {row["run_id"] for row in completed}


def test_people_get_tables_and_are_told_where_things_lie(kvp_here, smoke_run):
    finished = kvp_here("run", *smoke_run.options, home=smoke_run.home)
    text = finished.stdout
    assert finished.code == 0
    assert "Nothing had changed: no stage was run again." in text
    for method in CONTENDERS:
        assert re.search(rf"^\W*{method}\b.*\[", text, flags=re.MULTILINE), method
    for place in (*smoke_run.document["figures"], smoke_run.document["mlflow_tracking_uri"], "kvp sql --home"):
        assert place in text


def test_the_models_of_a_home_are_listed(kvp_here, smoke_run):
    (model,) = json.loads(kvp_here("models", "--json", home=smoke_run.home).stdout)
    assert model["model_id"] == smoke_run.document["model"]["id"]
    assert (model["num_layers"], model["num_kv_heads"]) == (30, 3)


def test_methods_and_benchmarks_are_listed(kvp_here):
    methods = json.loads(kvp_here("methods", "--json").stdout)
    assert [entry["method"] for entry in methods] == list(method_names())
    assert all(entry["description"] for entry in methods)
    tasks = json.loads(kvp_here("benchmarks", "--json").stdout)
    assert len([entry for entry in tasks if entry["benchmark"] == "ruler"]) == 13
    assert len([entry for entry in tasks if not entry["needs"]]) == 6
    assert "niah_single_1" in kvp_here("benchmarks").stdout
