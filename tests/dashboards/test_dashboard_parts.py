"""What the dashboard's pages are made of: choices in URLs, ticks, and what a head keeps."""

from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboards.app.difference_panels import read_differences
from dashboards.app.kept_tokens import HeadChoice, most_selective_head, shares_by_budget
from dashboards.app.selection import Selection
from dashboards.figures.drawing import log_ticks
from dashboards.figures.pairs import Correlations, draw_matrix
from dashboards.figures.series import make_panels
from storage.token_ranks import StoredContext, StoredRanking
from tests.dashboards.curve_points import point

names = st.text(min_size=1, max_size=8)


def context_of(importance: np.ndarray, rankings: tuple[StoredRanking, ...] = (), *, budget: int = 24) -> StoredContext:
    return StoredContext(
        sample_id="s",
        benchmark="b",
        task="t",
        setting="query_aware",
        budgets=(budget,),
        pieces=("",) * importance.shape[1],
        importance=importance,
        rankings=rankings,
    )


def choose(selection: Selection, task: list[str], methods: list[str]) -> tuple[str, list[str]]:
    return (
        selection.one("task", "Task", [(name, name) for name in task]),
        selection.several("method", "Methods", [(name, name) for name in methods]),
    )


@given(st.lists(names, min_size=1, unique=True), st.lists(names, min_size=1, unique=True), st.data())
@settings(deadline=None)
def test_the_url_of_a_selection_chooses_the_same(tasks, methods, data):
    asked = {
        "task": [data.draw(st.sampled_from(tasks))],
        "method": data.draw(st.lists(st.sampled_from(methods), min_size=1, unique=True)),
    }
    first = Selection(asked=asked)
    first.keep("id", "x & y=1")
    chosen = choose(first, tasks, methods)
    assert not first.notes
    again = Selection(asked=parse_qs(urlsplit(first.url("curves")).query, keep_blank_values=True))
    assert choose(again, tasks, methods) == chosen
    assert again.text("id") == "x & y=1"


def test_what_is_not_there_falls_back_and_is_told():
    selection = Selection(asked={"task": ["gone"], "method": ["gone", "kvp"], "page": ["-1"]})
    assert choose(selection, ["mean", "vt"], ["kvp", "h2o"]) == ("mean", ["kvp"])
    assert selection.number("page", default=1, least=1, most=9) == 1
    assert len(selection.notes) == 3
    assert choose(Selection(asked={"method": ["gone"]}), ["mean"], ["kvp", "h2o"]) == ("mean", ["kvp", "h2o"])


@given(st.floats(1e-9, 1e6), st.floats(1, 1e9))
def test_ticks_lie_between_the_ends_and_are_few(low, ratio):
    ticks = log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 24
    assert ticks == sorted(set(ticks))
    assert all(0.97 * low <= tick <= 1.03 * low * ratio for tick in ticks)


@given(st.integers(21, 60), st.integers(0, 2**32 - 1), st.data())
@settings(deadline=None)
def test_a_head_s_choice_is_what_sets_of_tokens_say(tokens, seed, data):
    draw = np.random.default_rng(seed)
    kept = data.draw(st.integers(20, tokens))
    importance = draw.random((1, tokens), dtype=np.float32)
    rankings = tuple(
        StoredRanking(
            sample_id="s",
            setting="query_aware",
            method=method,
            seed=0,
            ranks=(draw.permutation(tokens) + 1).astype(np.int32)[None],
            kept=np.array([[kept]], dtype=np.int32),
        )
        for method in ("kvp", "oracle")
    )
    context = context_of(importance, rankings, budget=99)
    choice = HeadChoice.of(context, rankings[0], head=0, budget=99)
    own, best = ({i for i in range(tokens) if ranking.ranks[0, i] <= kept} for ranking in rankings)
    assert set(np.flatnonzero(choice.wrongly_dropped)) == best - own
    assert set(np.flatnonzero(choice.wrongly_kept)) == own - best
    total = importance.sum(dtype=np.float64)
    assert choice.share_kept == pytest.approx(sum(float(importance[0, i]) for i in own) / total)
    assert shares_by_budget(choice.ranks, choice.importance)[kept - 1] == pytest.approx(choice.share_kept)
    assert int(choice.always_kept.sum()) == 20


def rows_of(values: dict[str, float], metric: str) -> list[dict]:
    return [point(method=name, metric=metric, value=own, ci_low=own, ci_high=own) for name, own in values.items()]


@pytest.mark.parametrize(("metric", "baseline"), [("kl", "h2o"), ("string_match", "snapkv")])
def test_without_paired_differences_the_best_heuristic_is_found_among_the_means(metric, baseline):
    values = {"kvp": 0.3, "h2o": 0.2, "snapkv": 0.6, "judgeq": 0.1, "oracle": 0.0}
    (panel,) = make_panels(rows_of(values, metric))
    found = read_differences(panel, [], ["h2o", "snapkv"])
    assert set(found) == set(values)
    for name, (entry,) in found.items():
        assert entry.baseline == baseline
        assert entry.value == pytest.approx(values[name] - values[baseline])
        assert entry.low is None
    assert read_differences(panel, [], []) == {}


def test_paired_differences_to_the_best_baseline_come_with_their_intervals():
    (panel,) = make_panels(rows_of({"kvp": 0.3, "h2o": 0.2}, "kl"))
    paired = {
        "benchmark": "ruler",
        "setting": "query_agnostic",
        "metric": "kl",
        "budget": 64,
        "method": "kvp",
        "other": "h2o",
        "difference": 0.12,
        "ci_low": 0.1,
        "ci_high": 0.2,
        "is_best_baseline": True,
    }
    unrelated = paired | {"other": "snapkv", "is_best_baseline": False, "difference": 9.0}
    of_another_metric = paired | {"metric": "kl_answer", "difference": 9.0}
    found = read_differences(panel, [unrelated, paired, of_another_metric], ["h2o"])
    assert [(entry.value, entry.low, entry.high) for entry in found["kvp"]] == [(0.12, 0.1, 0.2)]
    assert [entry.value for entry in found["h2o"]] == [0.0]  # the baseline itself


def test_heads_that_rank_alike_are_neighbours_in_the_tree():
    from scipy.cluster.hierarchy import leaves_list

    alike = {frozenset(pair) for pair in ((0, 3), (1, 4), (2, 5))}
    pairs = [
        {"head_a": a, "head_b": b, "spearman": 0.9 if frozenset((a, b)) in alike else 0.1, "n": 2}
        for a in range(6)
        for b in range(a + 1, 6)
    ]
    pairs[0]["spearman"] = None  # of a head without an order
    found = Correlations.of_rows(pairs, {head: f"L{head:02}.H0" for head in range(6)})
    order = leaves_list(found.tree()).tolist()
    assert {frozenset(order[place : place + 2]) for place in (0, 2, 4)} == alike
    assert np.isnan(found.matrix[0, 1])


def test_more_heads_than_a_tree_can_show_are_still_ordered():
    count = 300
    pairs = [
        {"head_a": a, "head_b": b, "spearman": 0.9 if a % 2 == b % 2 else -0.1, "n": 2}
        for a in range(count)
        for b in range(a + 1, count)
    ]
    found = Correlations.of_rows(pairs, {})
    (matrix,) = draw_matrix(found, found.tree()).drawing.data
    values = np.array(matrix.z)
    assert values.shape == (count, count)
    assert (values[:150, :150] > 0.8).all()
    assert (values[:150, 150:] < 0).all()


@pytest.mark.parametrize("num_tokens", [18, 20, 60])
def test_the_head_that_is_shown_first_attends_to_the_fewest_tokens(num_tokens):
    importance = np.ones((4, num_tokens), dtype=np.float32)
    importance[0, 0] = 1e6  # which every budget keeps
    importance[1, 4:-16] = 0
    importance[3, 4:-16] = 0.5 ** np.arange(max(0, num_tokens - 20))
    assert most_selective_head(context_of(importance)) == (3 if num_tokens > 20 else 0)
