"""What a report claims is what was planted, word by word, also where the learned policy loses."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from curve_points import point
from report_home import BUDGETS, FIDELITY, POLICIES

from dashboards.figures.series import make_panels
from dashboards.rendering.table import Table
from dashboards.report.claims import (
    Claim,
    claim_words,
    learned_methods,
    make_claims,
    oracle_words,
    ordered_metrics,
    ratio,
    summary_words,
)
from dashboards.report.document import Prose
from dashboards.report.view import ReportView, describe
from dashboards.report.wins import headlines, wins_section

WHERE = "ruler, query-agnostic, fidelity (KL)"


@pytest.fixture(scope="module")
def view(planted, task_comparisons) -> ReportView:
    return ReportView(rows=replace(planted.rows, task_comparisons=task_comparisons))


def lead(view: ReportView) -> list[Claim]:
    return [claim for claim in view.claims if claim.metric == "kl"]


def words(view: ReportView) -> list[str]:
    return [line for block in wins_section(view).blocks if isinstance(block, Prose) for line in block.lines]


def tables(view: ReportView) -> dict[str, Table]:
    return {block.title: block for block in wins_section(view).blocks if isinstance(block, Table)}


def changed(view: ReportView, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> ReportView:
    """The same evaluation with other comparisons."""
    rows = [dict(row) | dict(change(dict(row))) for row in view.rows.comparisons]
    return ReportView(rows=replace(view.rows, comparisons=rows))


def test_what_is_won_lost_and_undecided_is_what_was_planted(view):
    claims = {claim.budget: claim for claim in lead(view)}
    assert {budget: claim.wins for budget, claim in claims.items()} == {64: False, 128: False, 256: True}
    assert {b: [other.method for other in claim.not_beaten] for b, claim in claims.items()} == {
        64: ["snapkv"],
        128: ["h2o"],
        256: [],
    }
    assert {b: [other.method for other in claim.baselines] for b, claim in claims.items()} == {
        64: ["snapkv", "h2o"],
        128: ["h2o", "snapkv"],
        256: ["snapkv", "h2o"],
    }
    assert {b: claim.toughest.method for b, claim in claims.items() if claim.toughest} == {
        64: "snapkv",
        128: "h2o",
        256: "snapkv",
    }
    assert {b: ratio(claim, claim.oracle) for b, claim in claims.items()} == {64: "4", 128: "2", 256: "1.33"}


def test_the_outcome_is_said_in_these_words(view):
    assert words(view)[2:7] == [
        f"{WHERE}: kvp beats every baseline at 1 of 3 budgets: not at 64 tokens (snapkv) and 128 tokens (h2o).",
        f"{WHERE}: kvp has 1.33 to 4 times the oracle's value (ratios of means, without intervals); it is at most "
        "twice at 128 and 256 tokens.",
        "64 tokens (10 % of the context): kvp (0.4) does not beat every baseline: it is worse than snapkv (difference "
        "+0.1 [+0.05, +0.15]).",
        "128 tokens (20 % of the context): kvp (0.2) does not beat every baseline: undecided against h2o (difference "
        "-0.01 [-0.06, +0.04]).",
        "256 tokens (40 % of the context): kvp beats each of the 2 baselines. The best of them, snapkv, has 0.1 "
        "against 0.04: difference -0.06 [-0.11, -0.01].",
    ]
    assert headlines(view) == words(view)[2:4]


def test_tables_hold_the_planted_numbers(view):
    against = tables(view)[f"kvp against the best baseline and the oracle: {WHERE}"]
    assert against.rows[0][:6] == (
        "64 (10 %)",
        "0.4 [0.353, 0.449]",
        "snapkv 0.3",
        "1.33",
        "▼ +0.1 [+0.05, +0.15]",
        "0.000",
    )
    assert against.rows[2][6:] == ("0.03", "1.33", "· +0.01 [-0.04, +0.06]", "0.03 of 2")
    each = tables(view)[f"kvp minus every other contender: {WHERE}"]
    assert each.rows == (
        ("snapkv", "▼ +0.1 [+0.05, +0.15]", "▲ -0.3 [-0.35, -0.25]", "▲ -0.06 [-0.11, -0.01]"),
        ("h2o", "▲ -0.5 [-0.55, -0.45]", "· -0.01 [-0.06, +0.04]", "▲ -0.16 [-0.21, -0.11]"),
    )


def test_a_metric_where_more_is_better_is_read_the_other_way(view):
    assert f"ruler, query-agnostic, string match: {summary_tail(view)}" in words(view)
    (row,) = tables(view)[
        "kvp minus the baseline that stands strongest against it, by metric: ruler, query-agnostic"
    ].rows
    assert row == (
        "string match",
        "▼ snapkv -0.05 [-0.075, -0.025]",
        "· h2o +0.005 [-0.02, +0.03]",
        "▲ snapkv +0.03 [+0.005, +0.055]",
    )


def summary_tail(view: ReportView) -> str:
    return summary_words(lead(view), describe("kl")).split(": ", 1)[1]


def test_each_task_has_its_own_verdict(view, task_comparisons):
    said = [line for line in words(view) if ", task " in line]
    assert said == [
        f"ruler, query-agnostic, task {t}, fidelity (KL): {summary_tail(view)}" for t in ("niah_single_1", "vt")
    ]
    # In one task alone kvp wins everywhere.
    better = {"verdict": "better", "difference": -0.3, "ci_low": -0.4, "ci_high": -0.2}
    rows = [row | (better if row["task"] == "vt" and row["method"] == "kvp" else {}) for row in task_comparisons]
    said = words(ReportView(rows=replace(view.rows, task_comparisons=rows)))
    assert (
        "ruler, query-agnostic, task vt, fidelity (KL): kvp beats every baseline at every budget, 64 to 256 tokens (3 "
        "of 3)." in said
    )


def test_without_an_interval_nothing_is_won(view):
    lost = changed(view, lambda row: {"ci_low": None, "ci_high": None, "verdict": "undecided"})
    said = words(lost)
    assert f"{WHERE}: kvp beats every baseline at none of 3 budgets: not at {_everywhere(lost)}." in said
    assert any("undecided against snapkv (difference +0.1 [no interval]) and h2o" in line for line in said)
    assert all(
        "[no interval]" in cell
        for row in tables(lost)[f"kvp minus every other contender: {WHERE}"].rows
        for cell in row[1:]
    )


def _everywhere(view: ReportView) -> str:
    *first, last = (
        f"{claim.budget} tokens ({' and '.join(other.method for other in claim.baselines)})" for claim in lead(view)
    )
    return f"{', '.join(first)} and {last}"


def test_losing_everywhere_is_said(view):
    lost = changed(view, lambda row: {"verdict": "worse"} if row["method"] == "kvp" else {})
    assert headlines(lost)[0].startswith(
        f"{WHERE}: kvp beats every baseline at none of 3 budgets: not at 64 tokens (snapkv and h2o), "
    )


def test_bounds_are_no_baselines_and_neither_are_own_variants(view):
    """`full` and the oracle are better everywhere and are never counted; JudgeQ learns, but is not ours, and counts."""
    extra = []
    for name, made_from in (("kvp_heads", POLICIES[0].artifact_id), ("judgeq", "soft_tokens-0123456789abcdef")):
        extra += [
            point(method=name, budget=budget, value=0.02, policy_set_id=made_from, setting="query_agnostic")
            for budget in BUDGETS
        ]
    against = [
        dict(row) | {"other": name, "verdict": "worse", "difference": 0.1}
        for row in view.rows.comparisons
        if (row["method"], row["other"], row["metric"]) == ("kvp", "snapkv", "kl")
        for name in ("kvp_heads", "judgeq")
    ]
    more = ReportView(
        rows=replace(view.rows, curves=[*view.rows.curves, *extra], comparisons=[*view.rows.comparisons, *against])
    )
    assert more.learned == ["kvp", "kvp_heads"]
    for claim in lead(more):
        assert {other.method for other in claim.baselines} == {"snapkv", "h2o", "judgeq"}
        assert [other.method for other in claim.variants] == ["kvp_heads"]
        assert claim.oracle is not None and claim.oracle.method == "oracle"
    assert "kvp_heads" in [row[0] for row in tables(more)[f"kvp minus every other contender: {WHERE}"].rows]


def test_two_benchmarks_are_claimed_apart(view):
    other = [
        dict(row) | {"benchmark": "oasst2", "metric": "perplexity", "value": row["value"] + 1}
        for row in view.rows.curves
        if row["metric"] == "kl"
    ]
    wins = [
        dict(row) | {"benchmark": "oasst2", "metric": "perplexity", "verdict": "better"}
        for row in view.rows.comparisons
        if row["metric"] == "kl"
    ]
    both = ReportView(
        rows=replace(view.rows, curves=[*view.rows.curves, *other], comparisons=[*view.rows.comparisons, *wins])
    )
    said = headlines(both)
    assert said[0] == (
        "oasst2, query-agnostic, perplexity of the future: kvp beats every baseline at every budget, 64 to 256 tokens "
        "(3 of 3)."
    )
    assert said[2] == headlines(view)[0]


@pytest.mark.parametrize(
    ("empty", "said"),
    [
        ({"comparisons": ()}, "Not in this run: paired differences between methods, so nothing can be claimed."),
        ({"task_comparisons": ()}, "Not in this run: paired differences within single tasks."),
    ],
)
def test_what_cannot_be_claimed_is_said(view, empty, said):
    assert any(line.startswith(said) for line in words(ReportView(rows=replace(view.rows, **empty))))


def test_without_a_learned_policy_nothing_is_claimed(view):
    curves = [row for row in view.rows.curves if row["method"] != "kvp"]
    alone = ReportView(rows=replace(view.rows, curves=curves))
    assert headlines(alone) == []
    assert words(alone)[0].startswith("Not in this run: a learned policy.")


def test_without_baselines_nothing_is_claimed(view):
    rows = [row for row in view.rows.comparisons if {row["method"], row["other"]} <= {"kvp", "oracle", "full"}]
    alone = ReportView(rows=replace(view.rows, comparisons=rows))
    assert "64 tokens (10 % of the context): kvp 0.4; no baseline was evaluated here, so nothing is claimed." in words(
        alone
    )
    assert not any(claim.wins for claim in alone.claims)


def test_a_budget_without_its_value_is_no_claim(view):
    panels = make_panels([row for row in view.rows.curves if row["budget"] != 64])
    assert {claim.budget for claim in make_claims(view.rows.comparisons, panels, ["kvp"])} == {128, 256}


def test_values_are_means_over_seeds(view):
    for claim in lead(view):
        assert math.isclose(claim.value, FIDELITY["kvp"][BUDGETS.index(claim.budget)], rel_tol=1e-12)
        assert (claim.num_seeds, claim.seed_std) == (2, 0.03)


def test_own_methods_are_those_made_from_policy_sets(view):
    assert learned_methods(view.rows.curves) == ["kvp"]


@pytest.mark.parametrize(
    ("measured", "ordered"),
    [
        (("string_match", "kl_answer", "kl"), ["kl", "string_match"]),
        (("kl_answer", "accuracy"), ["kl_answer", "accuracy"]),
        (("missed_mass", "reward_correlation"), []),
        (("new", "perplexity"), ["perplexity", "new"]),
    ],
)
def test_fidelity_leads_and_analyses_do_not_compete(measured: Iterable[str], ordered: Sequence[str]):
    assert ordered_metrics(measured) == ordered


def test_a_share_of_the_context_is_left_out_where_it_is_unknown(view):
    assert claim_words(lead(view)[0], None).startswith("64 tokens: kvp (0.4) does not")
    assert "of the context" not in " ".join(words(ReportView(rows=replace(view.rows, samples=()))))


def test_the_oracle_is_not_divided_by_when_it_is_perfect(view):
    claims = [replace(claim, oracle=replace(claim.oracle, value=0.0)) for claim in lead(view) if claim.oracle]
    assert oracle_words(claims, describe("kl")) == ""
    assert {ratio(claim, claim.oracle) for claim in claims} == {"–"}
    shares = [claim for claim in view.claims if claim.metric == "string_match"]
    assert oracle_words(shares, describe("string_match")) == ""
