"""MLflow's own pages, in a real browser, on a home that a small run made."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from outcomes import catalog
from processes import environment, free_port, start_process, stop_process, tail

from tests.browser import open_browser

pytestmark = pytest.mark.slow
METHODS = ("kvp", "knorm", "snapkv")
# What each line of the plot shows, each twice: the values, and below them the values as they are without smoothing.
LINES = "Array.from(document.querySelector('.js-plotly-plot').data).map((line) => [line.name, line.x, line.y])"


@pytest.fixture(scope="module")
def url(small_run, tmp_path_factory) -> Iterator[str]:
    """Of MLflow's server, started as the README says."""
    log, port = tmp_path_factory.mktemp("mlflow") / "log", free_port()
    command = ["mlflow", "ui", "--backend-store-uri", small_run.document["mlflow_tracking_uri"], "--port", str(port)]
    process = start_process(command, log=log, env=environment())
    found, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while not _answers(found):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"mlflow ui did not start; it said: {tail(log)}", pytrace=False)
        time.sleep(0.5)
    yield found
    stop_process(process)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("chromium") / "profile") as context:
        made = context.new_page()
        made.set_default_timeout(60_000)
        yield made


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_the_compare_view_lays_curves_over_each_other_by_budget(small_run, url, page):
    chosen = "task = 'mean' AND metric = 'kl' AND setting = 'query_agnostic'"
    curves: dict[str, dict[int, float]] = {}
    runs: dict[str, str] = {}
    for row in catalog(small_run.home).rows("curves", chosen):
        if row["method"] in METHODS:
            curves.setdefault(row["method"], {})[row["budget"]] = row["value"]
            runs[row["method"]] = row["mlflow_run_id"]
    (experiment,) = {_experiment_of(url, run_id) for run_id in runs.values()}
    asked = {"runs": list(runs.values()), "metric": "kl", "experiments": [experiment], "plot_metric_keys": ["kl"]}
    asked["plot_layout"] = {"autosize": True, "xaxis": {}, "yaxis": {}}
    query = "&".join(f"{name}={quote(json.dumps(value))}" for name, value in asked.items())
    page.goto(f"{url}/#/metric?{query}&x_axis=step&y_axis_scale=linear&line_smoothness=1&show_point=true")
    page.wait_for_function(f"document.querySelector('.js-plotly-plot') && {LINES}.length >= {len(METHODS)}")
    drawn = {name: dict(zip(budgets, values, strict=True)) for name, budgets, values in page.evaluate(LINES)}
    assert drawn == {f"{method} query_agnostic": points for method, points in curves.items()}
    labels = page.locator(".js-plotly-plot text.xtitle").all_text_contents()
    assert labels == ["Step"]  # which is the budget


def test_a_policy_s_page_in_the_registry_shows_its_curves_and_where_it_is_from(small_run, url, page):
    policy = small_run.document["policy_set"]["id"]
    wanted = quote(f"tags.`kvp.policy_set_id` = '{policy}'")
    (version,) = _get(url, f"model-versions/search?filter={wanted}")["model_versions"]
    page.goto(f"{url}/#/models/{version['name']}/versions/{version['version']}")
    page.get_by_text("Mean KL divergence from the full cache in nats").first.wait_for()
    text = page.inner_text("body")
    assert small_run.document["trace_snapshot"]["id"] in text
    assert small_run.document["evaluation"]["id"] in text
    cells = page.locator("table:has-text('snapkv')").first.inner_text().split()
    budgets = {str(row["budget"]) for row in small_run.document["curves"]}
    assert {"method", *METHODS, *budgets} <= set(cells)


def _experiment_of(url: str, run_id: str) -> str:
    return _get(url, f"runs/get?run_id={run_id}")["run"]["info"]["experiment_id"]


def _get(url: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/api/2.0/mlflow/{path}", timeout=30) as answer:
        return json.load(answer)
