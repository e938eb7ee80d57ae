"""Decisions in a real catalog, read as a history; who was champion when, against a plain stack."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.catalog.catalog import Catalog
from storage.catalog.promotions import (
    AUTOMATIC,
    KEPT,
    MANUAL,
    PROMOTED,
    ROLLBACK,
    PromotionHistory,
    decided_models,
    read_history,
)


def row(
    challenger: str, before: str, *, kind: str = AUTOMATIC, decision: str = PROMOTED, **columns: Any
) -> dict[str, Any]:
    return {
        "model_digest": "model-digest",
        "kind": kind,
        "decision": decision,
        "challenger_id": challenger,
        "champion_before_id": before,
        "champion_id": challenger if decision == PROMOTED else before,
        "evaluation_id": "evaluation-1" if kind == AUTOMATIC else "",
        "setting": "query_agnostic" if kind == AUTOMATIC else "",
        "reason": "because",
        **columns,
    }


def record(catalog: Catalog, *rows: dict[str, Any]) -> list[str]:
    """Record each decision as a run of its own, and return the runs."""
    runs = []
    for number, of_run in enumerate(rows):
        with catalog.record_run(
            stage="promote", stage_key=f"{number:064d}", parameters={}, inputs={}, code_fingerprint="f" * 64
        ) as run:
            run.append("promotions", [of_run])
        runs.append(run.run_id)
    return runs


def test_a_home_without_the_table_has_no_champion(catalog: Catalog) -> None:
    history = read_history(catalog, "model-digest")
    assert (history.champion, history.challenger, history.champion_before, history.last_run_id) == ("", "", "", "")
    assert history.decision_on("a", "evaluation-1") is None
    assert decided_models(catalog) == []
    assert catalog.sql("SELECT * FROM champions").num_rows == 0


def test_the_history_of_each_model_is_its_own(catalog: Catalog) -> None:
    runs = record(
        catalog,
        row("a", ""),
        row("x", "", model_digest="another"),
        row("b", "a", decision=KEPT, difference=0.1, ci_low=-0.1, ci_high=0.3, worst_budget=64, n=6),
        row("b", "a", kind=MANUAL),
    )
    history = read_history(catalog, "model-digest")
    assert (history.champion, history.challenger, history.champion_before) == ("b", "b", "a")
    assert history.last_run_id == runs[-1]
    found = history.decision_on("b", "evaluation-1")
    assert found is not None
    assert (found["decision"], found["n"], found["run_id"]) == (KEPT, 6, runs[2])
    assert history.decision_on("b", "evaluation-2") is None
    assert read_history(catalog, "another").champion == "x"
    assert decided_models(catalog) == ["model-digest", "another"]


def test_the_view_has_the_decision_that_made_each_champion(catalog: Catalog) -> None:
    record(catalog, row("a", ""), row("x", "", model_digest="another"), row("b", "a"), row("c", "b", decision=KEPT))
    found = catalog.sql("SELECT model_digest, champion_id, champion_before_id FROM champions").to_pylist()
    assert [tuple(entry.values()) for entry in found] == [("another", "x", ""), ("model-digest", "b", "a")]


def test_decisions_of_failed_runs_do_not_count(catalog: Catalog) -> None:
    with (
        pytest.raises(OSError, match="full"),
        catalog.record_run(
            stage="promote", stage_key="0" * 64, parameters={}, inputs={}, code_fingerprint="f" * 64
        ) as run,
    ):
        run.append("promotions", [row("a", "")])
        raise OSError("full")
    assert read_history(catalog, "model-digest").champion == ""


STEPS = st.lists(st.tuples(st.sampled_from(["promote", "keep", "rollback"]), st.sampled_from("abcd")), max_size=30)


@given(st.sampled_from(["", "z"]), STEPS)
def test_rolling_back_goes_back_champion_by_champion(first: str, steps: list[tuple[str, str]]) -> None:
    champions = [first]  # of a home of an earlier release the first may come from MLflow's alias
    rows: list[dict[str, Any]] = []
    for step, name in steps:
        now = champions[-1]
        if step == "promote" and name != now:
            champions.append(name)
            rows.append(row(name, now, kind=MANUAL))
        elif step == "keep" and now and name != now:
            rows.append(row(name, now, decision=KEPT))
        elif step == "rollback" and len(champions) > 1 and champions[-2]:
            champions.pop()
            rows.append(row(champions[-1], now, kind=ROLLBACK))
        history = PromotionHistory(rows=rows)
        assert history.champion == (champions[-1] if rows else "")
        assert history.champion_before == (champions[-2] if len(champions) > 1 else "")
