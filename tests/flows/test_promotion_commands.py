"""Champion and challenger through the flows and the commands, on copies of the home of one small run."""

import json
import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from outcomes import assert_refused, catalog

from flows.display.run_artifact import decision_line, run_markdown
from kvpolicy.names import CHAMPION
from kvpolicy.results.promotion import PromoteConfig, decide_promotion
from kvpolicy.results.scores import ExampleScore
from kvpolicy.results.statistics import Bootstrap
from storage.catalog.promotions import read_history
from storage.home import Home
from storage.mlflow.tracking import CHALLENGER, Tracking
from storage.tables.lance_table import quote

FEW_METHODS = ("--methods", "kvp,knorm", "--set", "evaluate.num_analysed=0")
MORE_EXAMPLES = (*FEW_METHODS, "--set", "evaluate.num_samples=6")
SCORE_COLUMNS = ("sample_id", "benchmark", "task", "setting", "method", "seed", "budget", "metric", "value")


@pytest.fixture
def home(small_run, tmp_path: Path) -> Path:
    return shutil.copytree(small_run.home, tmp_path / "home")


def decisions(home: Path) -> list[dict[str, Any]]:
    return catalog(home).rows("promotions")


def aliased(home: Path, policy: str) -> tuple[str, str]:
    """The policy sets that are champion and challenger in MLflow."""
    tracking = Tracking(Home.open(home))
    return tracking.policy_with_alias(CHAMPION, beside=policy), tracking.policy_with_alias(CHALLENGER, beside=policy)


def test_the_first_policy_set_is_champion(small_run):
    (row,) = decisions(small_run.home)
    policy = small_run.document["policy_set"]["id"]
    promotion = small_run.document["promotion"]
    assert promotion == {name: row[name] for name in promotion}
    assert (promotion["champion_id"], promotion["reason"]) == (policy, "there was no champion yet")
    assert aliased(small_run.home, policy) == (policy, policy)
    history = read_history(catalog(small_run.home), small_run.document["model"]["digest"])
    assert history.champion == history.challenger == policy


def test_promoting_the_champion_says_that_nothing_was_recorded(kvp_here, small_run, home):
    policy, before = small_run.document["policy_set"]["id"], decisions(home)
    told = kvp_here("promote", policy, "--reason", "once more", home=home)
    assert (told.code, told.stderr) == (0, "")
    assert told.stdout.endswith("there was no champion yet; it was so already, and nothing was recorded\n")
    assert decisions(home) == before


@pytest.mark.slow
def test_a_second_training_is_decided_on_with_the_champion_on_the_same_examples(kvp_here, small_run, home):
    first = small_run.document["policy_set"]["id"]
    options = (*small_run.options, *MORE_EXAMPLES, "--seed", "1")
    again = json.loads(kvp_here("run", *options, "--json", home=home).stdout)
    second, promotion = again["policy_set"]["id"], again["promotion"]
    assert (promotion["challenger_id"], promotion["champion_before_id"]) == (second, first)
    assert promotion["champion_id"] == (second if promotion["decision"] == "promoted" else first)
    assert (promotion["n"], promotion["margin"], promotion["setting"]) == (6, 0.05, "query_agnostic")
    assert promotion["worst_budget"] in {row["budget"] for row in again["curves"]}

    judged = catalog(home).lineage(promotion["run_id"], "up")
    read = {edge.name: edge.source for edge in judged.edges if edge.target == promotion["run_id"]}
    assert (read["challenger"], read["champion"], read["evaluation"]) == (second, first, again["evaluation"]["id"])
    expected = decide_promotion(
        _scores(home, f"evaluation_id = {quote(again['evaluation']['id'])} AND method = 'kvp'"),
        _shard_scores(home, [name for role, name in read.items() if role.startswith("champion_shard")]),
        PromoteConfig(),
        Bootstrap(seed=1),
    )
    assert (promotion["reason"], promotion["difference"]) == (expected.reason, expected.difference.mean)

    assert aliased(home, first) == (promotion["champion_id"], second)
    before = decisions(home)
    assert len(before) == 2
    once_more = json.loads(kvp_here("run", *options, "--json", home=home).stdout)
    assert once_more["promotion"] == promotion
    assert decisions(home) == before
    printed = kvp_here("run", *options, home=home).stdout
    assert decision_line(promotion, second) in " ".join(printed.split())


@pytest.mark.slow
def test_few_examples_leave_the_champion(kvp_here, small_run, home):
    options = (*small_run.options, *FEW_METHODS, "--seed", "2")
    promotion = json.loads(kvp_here("run", *options, "--json", home=home).stdout)["promotion"]
    assert (promotion["decision"], promotion["n"]) == ("kept", 2)
    assert promotion["reason"] == "2 examples are too few: at 95% it takes at least 6"
    challenger = promotion["challenger_id"]
    said = kvp_here("promote", "--reason", "I looked at it", home=home)  # the newest challenger
    assert said.stdout.count("\n") == 1
    assert said.stdout.startswith(f"{challenger} is champion of tiny-llama (model-")
    assert said.stdout.endswith(" (manual): I looked at it\n")
    assert aliased(home, challenger) == (challenger, challenger)


@pytest.mark.slow
def test_without_kvp_nothing_is_decided(kvp_here, small_run, home):
    options = (*small_run.options, "--methods", "knorm,snapkv", "--set", "evaluate.num_analysed=0")
    document = json.loads(kvp_here("run", *options, "--json", home=home).stdout)
    assert document["promotion"] is None
    assert len(decisions(home)) == 1


def test_evaluating_alone_decides_nothing(kvp_here, small_run, home):
    assert kvp_here("evaluate", *small_run.options, *FEW_METHODS, home=home).code == 0
    assert len(decisions(home)) == 1


def test_by_hand_and_back(kvp_here, small_run, home):
    first = small_run.document["policy_set"]["id"]
    said = json.loads(kvp_here("promote", first[:20], "--json", home=home).stdout)
    assert (said["champion_id"], said["kind"]) == (first, "automatic")  # it was champion already
    assert len(decisions(home)) == 1
    assert_refused(kvp_here("rollback", home=home), "nothing to roll back to", first)
    assert kvp_here("train", *small_run.options, "--seed", "0", "--objective", "listwise", home=home).code == 0
    (second,) = {row["policy_set_id"] for row in catalog(home).rows("heads")} - {first}
    said = json.loads(kvp_here("promote", second, "--json", home=home).stdout)
    assert (said["champion_id"], said["champion_before_id"]) == (second, first)
    assert (said["kind"], said["reason"], said["decision"]) == ("manual", "by hand", "promoted")
    back = kvp_here("rollback", "--reason", "not yet", home=home)
    name = f"tiny-llama ({small_run.document['model']['id']})"
    assert back.stdout == f"{first} is champion of {name} in place of {second} (rollback): not yet\n"
    assert aliased(home, first) == (first, first)
    assert [row["kind"] for row in decisions(home)] == ["automatic", "manual", "rollback"]
    (found,) = json.loads(kvp_here("sql", "SELECT * FROM champions", "--format", "json", home=home).stdout)
    assert (found["champion_id"], found["reason"]) == (first, "not yet")
    run_id = decisions(home)[-1]["run_id"]
    assert_refused(kvp_here("rerun", run_id, home=home), run_id, "decided who is champion")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("promote", "policy_set-ffffffffffffffff"), "policy_set-ffffffffffffffff"),
        (("promote", "abc"), "abc"),
        (("rollback", "model-ffffffffffffffff"), "model-ffffffffffffffff"),
        (("promote", "{model}"), "is no policy set that was trained in"),
        (("promote", "{evaluation}"), "is no policy set that was trained in"),
        (("rollback", "{policy_set}"), "is no model: see `kvp models`"),
    ],
)
def test_a_wrong_name_is_one_line(kvp_here, small_run, args, said):
    ids = {name: small_run.document[name]["id"] for name in ("model", "evaluation", "policy_set")}
    assert_refused(kvp_here(*(arg.format(**ids) for arg in args), home=small_run.home), said)
    assert len(decisions(small_run.home)) == 1


def test_a_home_without_a_champion_is_one_line(kvp_here, tmp_path):
    home = tmp_path / "home"
    for command in ("promote", "rollback"):
        assert_refused(kvp_here(command, home=home), f"no home at {home}")
    Home.open(home)
    for command in ("promote", "rollback"):
        assert_refused(kvp_here(command, home=home), f"{command}: there is no champion here yet")


@pytest.mark.slow
def test_a_lost_champion_is_one_line_and_another_may_take_its_place(kvp_here, small_run, home):
    first = small_run.document["policy_set"]["id"]
    shutil.rmtree(catalog(home).artifact(first).uri)
    options = (*small_run.options, *FEW_METHODS, "--seed", "2")
    said = kvp_here("run", *options, home=home)
    assert_refused(said, f"{first} is lost or damaged", "`kvp promote` another one")
    (second,) = {row["policy_set_id"] for row in catalog(home).rows("heads")} - {first}
    assert kvp_here("promote", second, home=home).code == 0
    assert json.loads(kvp_here("run", *options, "--json", home=home).stdout)["promotion"] is None


def test_every_run_leaves_a_page_in_prefect(small_run, prefect_api):
    key = f"retrain-{small_run.document['model']['digest'][:8]}"
    body = json.dumps({"artifacts": {"key": {"any_": [key]}}}).encode()
    request = urllib.request.Request(f"{prefect_api}/artifacts/filter", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        pages = json.load(answer)
    wanted = run_markdown(small_run.document)
    assert wanted in [page["data"] for page in pages]
    page = next(page for page in pages if page["data"] == wanted)
    assert page["type"] == "markdown"
    assert page["flow_run_id"]


def test_the_page_has_curves_links_and_the_decision():
    page = run_markdown(document())
    lines = page.splitlines()
    assert lines[0] == "# tiny"
    assert "**Decision**: policy_set-1 became champion: better: KL differs" in lines
    assert "| method | 64 | 128 |" in lines
    assert "| kvp | 0.5000 | 0.2500 |" in lines  # mean over seeds
    assert "| knorm | 1.0000 | 0.7500 |" in lines
    assert sum(line.startswith("| method") for line in lines) == 2  # settings are never mixed
    assert "- evaluation `evaluation-1`: `kvp report evaluation-1 --home /lab`" in lines
    assert "- MLflow: `mlflow ui --backend-store-uri sqlite:////lab/mlflow/mlflow.db`" in lines


def test_what_was_not_promoted_is_told_with_who_stays():
    kept = {"decision": "kept", "champion_id": "policy_set-0", "reason": "undecided"}
    assert decision_line(kept, "policy_set-1") == "policy_set-0 stays champion, not policy_set-1: undecided"
    assert decision_line(None, "policy_set-1").startswith("none on policy_set-1: ")


def document() -> Mapping[str, Any]:
    def curve(method, budget, value, *, seed=0, setting="query_agnostic", metric="kl", task="mean"):
        row = {"method": method, "benchmark": "ruler", "task": task, "setting": setting, "metric": metric}
        return {**row, "budget": budget, "value": value, "seed": seed}

    return {
        "home": "/lab",
        "mlflow_tracking_uri": "sqlite:////lab/mlflow/mlflow.db",
        "model": {"id": "model-1", "digest": "0123456789", "name": "tiny"},
        "policy_set": {"id": "policy_set-1", "path": "/lab/policies/policy_set-1"},
        "trace_snapshot": {"id": "trace_snapshot-1"},
        "evaluation": {"id": "evaluation-1"},
        "promotion": {"decision": "promoted", "champion_id": "policy_set-1", "reason": "better: KL differs"},
        "curves": [
            curve("kvp", 128, 0.2),
            curve("kvp", 128, 0.3, seed=1),
            curve("kvp", 64, 0.4),
            curve("kvp", 64, 0.6, seed=1),
            curve("knorm", 64, 1.0),
            curve("knorm", 128, 0.75),
            curve("knorm", 128, 9.0, metric="perplexity"),
            curve("knorm", 128, 9.0, task="vt"),
            curve("kvp", 64, 0.1, setting="query_aware"),
        ],
    }


def _scores(home: Path, where: str) -> list[ExampleScore]:
    rows = catalog(home).rows("scores", f"{where} AND metric = 'kl' AND setting = 'query_agnostic'", SCORE_COLUMNS)
    return [ExampleScore(**row) for row in rows]


def _shard_scores(home: Path, shards: list[str]) -> list[ExampleScore]:
    import pyarrow.parquet as pq

    rows = [
        row
        for shard in sorted(shards)
        for row in pq.read_table(Path(catalog(home).artifact(shard).uri) / "scores.parquet").to_pylist()
    ]
    return [ExampleScore(**row) for row in rows if (row["method"], row["metric"]) == ("kvp", "kl")]
