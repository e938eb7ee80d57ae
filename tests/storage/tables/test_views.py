"""The views over results: what they show of rows that are known, and of which run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from storage.catalog.catalog import Catalog
from storage.errors import StorageError
from storage.tables.schemas import TABLES
from tests.storage.conftest import artifact

Row = Mapping[str, Any]


def record(
    catalog: Catalog, key: str, table: str, rows: Sequence[Row], *, seed: int | None = None, **parameters: Any
) -> str:
    """Record a run that made some rows, and return its id."""
    with catalog.record_run(
        stage="train", stage_key=key, parameters=parameters, inputs={}, code_fingerprint="f" * 64, seed=seed
    ) as run:
        run.output("made", artifact("policy_set", key))
        run.append(table, rows)
    return run.run_id


def head_rows(policy: str, costs: Sequence[float], model: str = "model-digest", **columns: Any) -> list[Row]:
    return [
        {
            "policy_set_id": policy,
            "model_digest": model,
            "head": head,
            "head_name": f"L{head:02d}.H0",
            "layer": head,
            "kv_head": 0,
            "heldout_cost": cost,
            "steps": 100,
            **columns,
        }
        for head, cost in enumerate(costs)
    ]


def comparison_row(method: str, other: str, confidence: float, verdict: str, **columns: Any) -> Row:
    return {
        "evaluation_id": "evaluation-1",
        "model_digest": "model-digest",
        "benchmark": "ruler",
        "setting": "query_agnostic",
        "metric": "kl",
        "budget": 64,
        "method": method,
        "other": other,
        "difference": 0.5 - confidence,
        "confidence": confidence,
        "verdict": verdict,
        "is_contest": True,
        "is_best_baseline": False,
        "n": 12,
        "num_seeds": 1,
        "other_num_seeds": 1,
        **columns,
    }


def test_the_shape_of_a_head_may_be_left_out(catalog: Catalog) -> None:
    shaped = {"zipf_slope": 1.5, "effective_tokens": 20.0, "rank_deviation": 0.02}
    record(catalog, "a", "heads", head_rows("policy-a", [1.1]))
    record(catalog, "b", "heads", head_rows("policy-b", [1.2], **shaped))
    found = {row["policy_set_id"]: row for row in catalog.rows("heads")}
    assert {name: found["policy-b"][name] for name in shaped} == shaped
    assert {found["policy-a"][name] for name in shaped} == {None}


def test_best_and_worst_heads_are_those_of_the_newest_policy_set(catalog: Catalog) -> None:
    costs = [1.0 + (7 * head % 20) / 10 for head in range(20)]
    record(catalog, "old", "heads", head_rows("policy-old", [9.0] * 20))
    record(catalog, "new", "heads", head_rows("policy-new", costs))
    record(catalog, "other", "heads", head_rows("policy-other", [3.0, 2.0], model="other-digest"))
    rows = catalog.sql("FROM best_and_worst_heads WHERE model_digest = 'model-digest'").to_pylist()
    ranked = sorted(range(20), key=lambda head: costs[head])
    assert [row["head"] for row in rows] == [*ranked[:5], *ranked[-5:]]
    assert [row["from_best"] for row in rows] == [1, 2, 3, 4, 5, 16, 17, 18, 19, 20]
    assert [row["from_worst"] for row in rows] == [20, 19, 18, 17, 16, 5, 4, 3, 2, 1]
    few = catalog.sql("SELECT head FROM best_and_worst_heads WHERE model_digest = 'other-digest'")
    assert few["head"].to_pylist() == [1, 0]  # each once, where there are fewer than ten


def test_who_beats_whom_shows_each_pair_once_the_leading_one_first(catalog: Catalog) -> None:
    rows = [
        comparison_row("kvp", "knorm", 0.99, "better", seed_std=0.01, num_seeds=3),
        comparison_row("knorm", "kvp", 0.01, "worse"),
        comparison_row("tova", "knorm", 0.4, "undecided"),
        comparison_row("knorm", "tova", 0.6, "undecided"),
        comparison_row("h2o", "tova", 0.5, "undecided"),
        comparison_row("tova", "h2o", 0.5, "undecided"),
        comparison_row("oracle", "kvp", 1.0, "better", is_contest=False),
    ]
    record(catalog, "old", "comparisons", [comparison_row("tova", "kvp", 0.9, "better")])
    record(catalog, "new", "comparisons", rows)
    record(catalog, "elsewhere", "comparisons", [comparison_row("tova", "kvp", 0.7, "undecided", benchmark="oasst2")])
    found = catalog.sql("SELECT benchmark, method, other, verdict, confidence FROM who_beats_whom").to_pylist()
    assert [tuple(row.values()) for row in found] == [
        ("oasst2", "tova", "kvp", "undecided", 0.7),
        ("ruler", "h2o", "tova", "undecided", 0.5),
        ("ruler", "knorm", "tova", "undecided", 0.6),
        ("ruler", "kvp", "knorm", "better", 0.99),
    ]


def test_the_difference_to_the_best_baseline_is_a_comparison(catalog: Catalog) -> None:
    rows = [
        comparison_row("kvp", "tova", 0.9, "undecided", is_best_baseline=True),
        comparison_row("kvp", "knorm", 1.0, "better"),
    ]
    record(catalog, "e", "comparisons", rows)
    query = "SELECT other FROM comparisons WHERE method = 'kvp' AND is_best_baseline"
    assert catalog.sql(query).to_pylist() == [{"other": "tova"}]


def test_training_outcomes_say_how_each_policy_set_was_trained(catalog: Catalog) -> None:
    agent = {"position": "continuous", "width": 64}
    runs = [
        record(
            catalog,
            f"{objective}-{seed}",
            "heads",
            head_rows(f"policy-{objective}-{seed}", costs),
            seed=seed,
            train={"objective": objective, "agent": agent},
        )
        for objective, seed, costs in (("exact", 0, [1.0, 1.5]), ("exact", 1, [1.5, 1.6]), ("rloo", 0, [1.0, 1.1]))
    ]
    found = catalog.sql("FROM training_outcomes").to_pylist()
    assert [(row["objective"], row["seed"], row["run_id"]) for row in found] == [
        ("rloo", 0, runs[2]),
        ("exact", 0, runs[0]),
        ("exact", 1, runs[1]),
    ]
    assert [row["mean_heldout_cost"] for row in found] == pytest.approx([1.05, 1.25, 1.55])
    assert {row["agent"] for row in found} == {'{"position":"continuous","width":64}'}
    assert {(row["steps"], row["num_heads"]) for row in found} == {(100, 2)}
    by_seed = "SELECT objective, count(*) AS seeds FROM training_outcomes GROUP BY ALL ORDER BY objective"
    assert catalog.sql(by_seed).to_pylist() == [{"objective": "exact", "seeds": 2}, {"objective": "rloo", "seeds": 1}]


def test_pairs_of_heads_and_findings_have_tables(catalog: Catalog) -> None:
    pair = {"policy_set_id": "p", "model_digest": "m", "head_a": 0, "head_b": 1, "spearman": 0.5, "n": 4}
    record(catalog, "p", "head_pairs", [pair, {**pair, "head_b": 2, "spearman": None}])
    assert [row["spearman"] for row in catalog.rows("head_pairs")] == [0.5, None]
    finding = {
        "evaluation_id": "e",
        "model_digest": "m",
        "benchmark": "ruler",
        "setting": "query_aware",
        "analysis": "leave_one_out",
        "quantity": "spearman",
        "method": "kvp",
        "seed": 0,
        "value": 0.4,
        "n": 3,
    }
    record(catalog, "f", "findings", [finding])
    (row,) = catalog.rows("findings")
    assert (row["value"], row["budget"], row["ci_low"]) == (0.4, None, None)


@pytest.mark.parametrize("table", ["comparisons", "head_pairs", "findings"])
def test_a_row_without_its_values_is_refused(catalog: Catalog, table: str) -> None:
    with pytest.raises(StorageError, match=f"table {table}, row 0: no value for .*{TABLES[table].names[1]}"):
        record(catalog, "bad", table, [{TABLES[table].names[0]: "x"}])
