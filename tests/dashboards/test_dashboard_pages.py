"""The dashboard's pages as the server answers them: what a URL chooses, what is told of it, and what is not there."""

import csv
import dataclasses
import html
import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_client import client_of, page
from dashboard_home import RANKED, SAMPLE, TOKENS, context, make_dashboard_home, ranked_folder, rankings
from report_home import EVALUATION, FIDELITY, MODEL, POLICIES, artifact, head_cost_rows, record
from starlette.testclient import TestClient

from dashboards.app.content import NAVIGATION
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.token_ranks import write_token_ranks

OF_PLANTED = f"evaluation={EVALUATION.artifact_id}"
PREFECT, MLFLOW = "http://127.0.0.1:4200", "http://127.0.0.1:5000"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, dict[str, str]]:
    home = Home.open(tmp_path_factory.mktemp("dashboard") / "home")
    return home, make_dashboard_home(home)


@pytest.fixture(scope="module")
def client(made) -> TestClient:
    return client_of(made[0])


def figure(text: str, name: str) -> dict[str, Any]:
    found = re.search(rf'<script type="application/json" id="data-{name}">(.*?)</script>', text, re.DOTALL)
    assert found, f"no figure {name}"
    return json.loads(found[1])


def lines(text: str, name: str) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in figure(text, name)["data"] if trace.get("showlegend", True)}


def chosen(text: str) -> dict[str, str]:
    """Menu to the value that it shows."""
    found = {}
    for name, options in re.findall(r'<select name="(\w+)".*?>(.*?)</select>', text, re.DOTALL):
        (found[name],) = re.findall(r'<option value="([^"]*)" selected>', options)
    return found


@pytest.mark.parametrize("name", NAVIGATION)
def test_every_page_is_there_and_leads_to_all_others(client, name):
    text = page(client, f"/{name}")
    assert f"<h1>{NAVIGATION[name]}</h1>" in text
    for other in NAVIGATION:
        assert f'href="/{other}' in text
    assert 'aria-current="page"' in text


def test_the_start_is_the_curves(client):
    assert client.get("/", follow_redirects=False).headers["location"] == "/curves"


def test_nothing_is_fetched_from_elsewhere(client):
    for name in NAVIGATION:
        text = page(client, f"/{name}")
        for place in re.findall(r'(?:src|href|action)="([^"]*)"', text):
            assert place.startswith("/"), place
    assert "plotly.js v" in client.get("/plotly.js").text[:200]
    policy = client.get("/curves").headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")


def test_curves_are_the_planted_ones_over_all_seeds(client):
    text = page(client, f"/curves?{OF_PLANTED}")
    drawn = lines(text, "curves")
    assert set(drawn) == set(FIDELITY) - {"full"}  # what KL is measured from
    assert len(figure(text, "curves")["data"]) == 8  # a band and a line each
    assert drawn["kvp"]["x"] == [64, 128, 256]
    assert drawn["kvp"]["y"] == pytest.approx(FIDELITY["kvp"])
    assert figure(text, "curves")["layout"]["xaxis"]["type"] == "log"


def test_a_url_chooses_methods_seeds_scale_and_task(client):
    asked = "method=kvp&method=snapkv&seed=1&scale=linear&task=vt&metric=kl"
    text = page(client, f"/curves?{OF_PLANTED}&{asked}")
    drawn = lines(text, "curves")
    assert list(drawn) == ["snapkv", "kvp"]
    assert drawn["kvp"]["y"] == pytest.approx([value * 1.02 + 0.01 for value in FIDELITY["kvp"]])
    assert figure(text, "curves")["layout"]["xaxis"]["type"] == "linear"
    assert "no bands: all intervals have no width" in text  # of one task and one seed, whose samples are alike
    assert chosen(text) | {"scale": "linear", "task": "vt"} == chosen(text)


def test_differences_are_to_the_best_heuristic_and_have_their_paired_intervals(client):
    text = page(client, f"/curves?{OF_PLANTED}&method=kvp&task=vt")
    assert "bands: intervals of paired differences" in text
    _, line = figure(text, "differences")["data"]
    assert line["y"] == pytest.approx([0.1, -0.01, -0.06], abs=1e-9)  # snapkv, h2o, snapkv
    assert [entry[0] for entry in line["customdata"]] == ["snapkv", "h2o", "snapkv"]
    lost = page(client, f"/curves?{OF_PLANTED}&method=kvp&task=vt&metric=string_match")
    assert "without intervals, since the samples' scores are not in the catalog" in html.unescape(lost)
    assert len(figure(lost, "differences")["data"]) == 1


def test_the_csv_has_what_the_page_shows(client):
    answer = client.get(f"/curves.csv?{OF_PLANTED}&method=kvp&method=h2o")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(row["method"], int(row["budget"])) for row in rows] == [
        (method, budget) for method in ("kvp", "h2o") for budget in (64, 128, 256)
    ]
    assert [float(row["value"]) for row in rows[:3]] == pytest.approx(FIDELITY["kvp"])
    assert {row["num_seeds"] for row in rows[:3]} == {"2"}


def test_the_newest_evaluation_is_the_default_and_the_choice_goes_along(client):
    text = page(client, "/curves")
    assert chosen(text)["evaluation"] == RANKED.artifact_id
    other = page(client, f"/curves?{OF_PLANTED}")
    assert chosen(other)["evaluation"] == EVALUATION.artifact_id
    links = re.findall(r'href="(/heads\?[^"]*)"', other)
    assert chosen(page(client, links[0].replace("&amp;", "&")))["evaluation"] == EVALUATION.artifact_id


def test_what_a_url_asks_for_and_is_not_there_is_told(client):
    text = page(client, "/curves?evaluation=evaluation-of-another-home&method=nosuch&task=%3Cb%3E")
    assert "There is no evaluation “evaluation-of-another-home” here" in text
    assert "Not among the methods here: “nosuch”." in text
    assert "There is no task “&lt;b&gt;” here; this shows mean over tasks." in text
    assert "<b>" not in text


def test_maps_of_heads_hold_costs_and_gains(client):
    text = page(client, f"/heads?{OF_PLANTED}")
    (costs,) = figure(text, "costs")["data"]
    assert [len(row) for row in costs["z"]] == [3, 3]  # two KV heads of three layers
    assert costs["customdata"] == [[0, 2, 4], [1, 3, 5]]
    assert costs["text"][1][2] == "L02.H1<br>cost 1.7"
    (gains,) = figure(text, "gains")["data"]
    found = [10 ** gains["z"][head % 2][head // 2] for head in range(6)]
    assert found == pytest.approx([(2.5 + 0.1 * head) / (1.2 + 0.1 * head) for head in range(6)])  # snapkv over kvp
    assert "costs less, which it does in 6 of 6 heads" in text
    (h2o,) = figure(page(client, f"/heads?{OF_PLANTED}&baseline=h2o"), "gains")["data"]
    assert 10 ** h2o["z"][0][0] == pytest.approx(3.0 / 1.2)


def test_a_head_in_detail(client):
    text = page(client, f"/heads?evaluation={RANKED.artifact_id}&head=1")
    assert "L00.H1: kvp against the oracle" in text
    by_kind = {trace["name"]: trace for trace in figure(text, "ranking")["data"]}
    assert list(by_kind) == ["kept by both (22)", "wrongly dropped (2)", "wrongly kept (2)", "dropped by both (14)"]
    assert by_kind["wrongly dropped (2)"]["x"] == [21, 22]  # the oracle's ranks
    assert by_kind["wrongly dropped (2)"]["y"] == [39, 40]
    attention = lines(text, "attention")
    assert attention["oracle"]["y"][-1] == pytest.approx(1)
    assert all(best >= own - 1e-9 for best, own in zip(attention["oracle"]["y"], attention["kvp"]["y"], strict=True))
    (importance,) = figure(text, "importance")["data"]
    assert importance["y"] == sorted(importance["y"], reverse=True)
    assert "How L00.H1 learned is not in the catalog." not in text  # the mean of all heads is


def test_a_head_of_an_evaluation_without_rankings_says_what_to_run(client):
    text = page(client, f"/heads?{OF_PLANTED}&head=0")
    assert "kvp evaluate --set evaluate.num_ranked=1" in text
    assert "plot-training" in text


def test_heads_without_attention_and_costs_that_are_no_numbers_are_left_empty(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    make_dashboard_home(home)
    blank = dataclasses.replace(context(), importance=np.zeros((2, TOKENS), dtype=np.float32))
    write_token_ranks(ranked_folder(home), [blank], [own for own in rankings() if own.method == "oracle"])
    assert figure(page(client_of(home), "/heads?head=1"), "importance")["data"] == []
    newer = artifact("evaluation", "of nothing")
    rows = [row | {"evaluation_id": newer.artifact_id, "cost": math.nan} for row in head_cost_rows()]
    record(Catalog(home), "evaluate", {"model": MODEL}, {"evaluation": newer}, {"head_costs": rows})
    text = page(client_of(home), f"/heads?evaluation={newer.artifact_id}")
    for name in ("costs", "gains"):
        assert {value for row in figure(text, name)["data"][0]["z"] for value in row} == {None}
    assert "0 heads, none of them known" in text


def test_tokens_are_shaded_by_rank_beside_their_attention(client):
    text = page(client, "/tokens?contender=kvp.0&head=0&budget=24")
    ranked, attended = (
        re.findall(r'<span class="([^"]*)" title="([^"]*)">([^<]*)</span>', part)
        for part in re.findall(r'<div class="text" id="(?:ranked|attended)">(.*?)</div>', text, re.DOTALL)
    )
    assert len(ranked) == len(attended) == 40
    assert ranked[39][2] == "&lt;b&gt;↵\n"
    dropped = [place for place, (classes, _, _) in enumerate(ranked) if "gone dropped" in classes]
    extra = [place for place, (classes, _, _) in enumerate(ranked) if "extra" in classes]
    assert (dropped, extra) == ([4, 5], [22, 23])
    assert sum(classes.startswith("kept") for classes, _, _ in ranked) == 24
    assert attended[4][0] == "a9 dropped"
    assert "token 4: kvp rank 39, oracle rank 21; 45.45% of the future attention, wrongly dropped" in ranked[4][1]
    assert ranked[0][1].endswith("always kept")
    assert SAMPLE in text


def test_tokens_at_a_budget_that_keeps_enough_are_no_longer_dropped(client):
    everything = page(client, "/tokens?contender=snapkv.0&budget=32")
    assert 'class="gone dropped"' not in everything.split('id="ranked"')[1]
    assert "32 of 40" in everything


def test_heads_are_clustered_or_by_layer(client):
    text = page(client, f"/similarity?policy={POLICIES[0].artifact_id}")
    matrix, tree = figure(text, "similarity")["data"]
    assert len(matrix["z"]) == 6
    assert all(matrix["z"][place][place] == 1 for place in range(6))
    assert tree["x"].count(None) == 5  # six heads are joined by five branches
    layers = figure(page(client, "/similarity?order=layers"), "similarity")
    assert layers["layout"]["xaxis"]["ticktext"] == [f"L0{layer}.H{head}" for layer in range(3) for head in range(2)]
    assert layers["data"][0]["z"][0] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_lineage_goes_from_node_to_node(made, client):
    _, runs = made
    text = page(client, f"/lineage?id={runs['evaluate']}")
    (targets,) = re.findall(r'id="targets">(.*?)</script>', text, re.DOTALL)
    urls = json.loads(targets)
    assert text.count('class="node') == len(urls)
    assert any(MODEL.artifact_id in url for url in urls)
    assert f"run {runs['evaluate']}" in text
    model = page(client, f"/lineage?id={MODEL.artifact_id}&way=down&steps=2")
    assert "What came from model tiny model" in model
    assert "read by" in model
    grouped = next(url for url in urls if "group=" in url)
    assert "that have the same place in this lineage" in page(client, grouped)


def test_lineage_of_nothing_known_is_a_message(client):
    assert "no artifact, run or MLflow run &#39;nothing-there&#39;" in page(
        client, "/lineage?id=nothing-there", status=404
    )
    assert "may mean" in page(client, "/lineage?id=policy_set", status=404)
    assert "is no id" in page(client, "/lineage?id=%27%3B--", status=404)


def test_runs_are_listed_with_what_became_of_them(made, client):
    home, runs = made
    text = page(client, "/runs?stage=train")
    assert text.count('<span class="tag completed">') == 3
    assert runs["train tiny, exact, seed 0"] in text
    assert runs["evaluate"] not in text.split('id="runs"')[1].split("</section>")[0]
    assert PREFECT not in text
    running = client_of(home, prefect=PREFECT, mlflow=MLFLOW)
    assert re.search(rf"{MLFLOW}/#/runs/[0-9a-f]{{32}}", page(running, "/runs?stage=evaluate"))
    assert page(running, f"/curves?{OF_PLANTED}").count(f'href="{MLFLOW}/#/runs/') == 6  # kvp has two seeds


def test_every_curve_leads_to_its_lineage(client):
    text = page(client, f"/curves?{OF_PLANTED}&method=kvp").split("Where each curve is from")[1]
    links = re.findall(r'href="(/lineage\?id=curve-\w+)"', text)
    assert len(links) == 2
    assert "What led to and came from curve ruler kvp 0" in page(client, links[0])


def test_failed_runs_and_champions_are_shown(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    make_dashboard_home(home)
    catalog = Catalog(home)
    with (
        pytest.raises(RuntimeError),
        catalog.record_run(stage="collect", stage_key="k", parameters={}, inputs={}, code_fingerprint="f" * 64),
    ):
        raise RuntimeError("<i>no room</i>")
    decision = {
        "model_digest": MODEL.digest,
        "kind": "automatic",
        "decision": "promoted",
        "challenger_id": POLICIES[1].artifact_id,
        "champion_before_id": POLICIES[0].artifact_id,
        "champion_id": POLICIES[1].artifact_id,
        "evaluation_id": EVALUATION.artifact_id,
        "setting": "query_agnostic",
        "difference": -0.25,
        "ci_low": -0.3,
        "ci_high": -0.2,
        "worst_budget": 64,
        "worst_change": 0.0,
        "margin": 0.05,
        "n": 8,
        "reason": "better by more than its interval",
    }
    record(catalog, "promote", {"policy": POLICIES[1]}, {}, {"promotions": [decision]})
    text = page(client_of(home), "/runs")
    assert '<span class="tag failed">failed</span>' in text
    assert "&lt;i&gt;no room&lt;/i&gt;" in text
    assert text.count("-0.25 [-0.3, -0.2]") == 2  # the champion's last decision, and the challenger's
    assert "better by more than its interval" in text


def test_a_thousand_runs_are_shown_page_by_page(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    catalog = Catalog(home)
    rows = [
        {
            "run_id": f"run-{number:016x}",
            "stage": "train-heads",
            "stage_key": str(number),
            "outcome": "completed",
            "reason": "",
            "reused_run_id": "",
            "parameters_json": "{}",
            "seed": number,
            "git_commit": "",
            "git_dirty": False,
            "environment_id": "",
            "code_fingerprint": "f",
            "hardware": "",
            "started_at": 1_700_000_000_000_000 + number * 1_000_000,
            "ended_at": 1_700_000_001_000_000 + number * 1_000_000,
            "seconds": 1.0,
            "prefect_flow_run_id": "",
            "prefect_task_run_id": "",
            "mlflow_run_id": "",
        }
        for number in range(1000)
    ]
    catalog.append("runs", rows)
    client = client_of(home)
    text = page(client, "/runs")
    assert text.count('class="tag completed"') == 50
    assert "page 1 of 20" in text
    assert "run-00000000000003e7" in text
    assert "run-0000000000000000" in page(client, "/runs?page=20")
    assert "page “21” is not from 1 to 20; this shows 1." in page(client, "/runs?page=21")


def test_a_new_run_is_seen_and_what_was_read_is_not_read_again(tmp_path: Path):
    home = Home.open(tmp_path / "home")
    make_dashboard_home(home)
    client = client_of(home)
    page(client, f"/curves?{OF_PLANTED}")
    shutil.rmtree(home.catalog / "curves.lance")  # what completed runs wrote does not change, so it is not missed
    record(Catalog(home), "prompts", {"model": MODEL}, {"prompts": artifact("prompts", "newer")})
    assert lines(page(client, f"/curves?{OF_PLANTED}"), "curves")
    assert "newer" in page(client, "/lineage")


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "1e3", "²", "1" * 19, ""])
def test_a_number_that_is_none_is_told(client, number):
    assert "is not from 0 to 39; this shows 0." in page(client, f"/tokens?from={number}")
    assert "is not from 1 to 1; this shows 1." in page(client, f"/runs?page={number}")
