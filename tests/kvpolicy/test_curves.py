"""Budget curves and comparisons: against direct computations, with the sign right on both sides of every metric."""

import numpy as np
import pytest

from kvpolicy.curves import beats_all, budget_curves, compare_with_heuristics
from kvpolicy.statistics import bootstrap_mean
from tests.kvpolicy.example_scores import BOOTSTRAP, TASKS, draw, example_scores


def test_points_are_means_of_tasks_and_the_mean_over_tasks():
    values = {("kvp", 64): draw(0), ("kvp", 96): draw(1), ("knorm", 64): draw(2), ("knorm", 96): draw(3)}
    scores = [score for (method, budget), row in values.items() for score in example_scores(method, row, budget=budget)]
    points = budget_curves(scores, **BOOTSTRAP)
    found = {(point.method, point.budget, point.task): point.interval for point in points}
    assert len(found) == len(points) == 4 * 3
    for (method, budget), row in values.items():
        of_task = {"vt": row[:3], "cwe": row[3:]}
        for task, own in of_task.items():
            interval = found[method, budget, task]
            assert interval.mean == pytest.approx(own.mean())
            assert interval.n == len(own)
            alone = bootstrap_mean(own, **BOOTSTRAP)
            assert (interval.low, interval.high) == pytest.approx((alone.low, alone.high))
        mean = found[method, budget, "mean"]
        assert mean.mean == pytest.approx((row[:3].mean() + row[3:].mean()) / 2)  # tasks count alike, not examples
        assert mean.low < mean.mean < mean.high
        assert mean.n == 8


def test_the_width_of_an_interval_is_that_of_the_stratified_mean():
    tasks = ("vt",) * 60 + ("cwe",) * 200
    values = draw(0, tasks) * np.where(np.array(tasks) == "vt", 3.0, 0.5)
    points = budget_curves(example_scores("kvp", values, tasks=tasks), seed=0, num_resamples=4000, confidence=0.95)
    (mean,) = (point.interval for point in points if point.task == "mean")
    error = 0.5 * np.sqrt(values[:60].var(ddof=1) / 60 + values[60:].var(ddof=1) / 200)
    assert mean.high - mean.low == pytest.approx(2 * 1.96 * error, rel=0.08)


def test_settings_metrics_and_seeds_are_never_mixed():
    scores = [
        *example_scores("random", np.zeros(8), seed=0),
        *example_scores("random", np.ones(8), seed=1),
        *example_scores("random", np.full(8, 2.0), setting="query_aware"),
        *example_scores("random", np.full(8, 3.0), metric="string_match"),
    ]
    points = budget_curves(scores, **BOOTSTRAP)
    means = {(p.setting, p.metric, p.seed): p.interval.mean for p in points if p.task == "mean"}
    expected = {
        ("query_agnostic", "kl", 0): 0.0,
        ("query_agnostic", "kl", 1): 1.0,
        ("query_aware", "kl", 0): 2.0,
        ("query_agnostic", "string_match", 0): 3.0,
    }
    assert means == pytest.approx(expected)


def test_benchmarks_are_never_mixed():
    scores = [
        *example_scores("kvp", np.zeros(8)),
        *example_scores("kvp", np.ones(3), tasks=("boolq",) * 3, benchmark="boolq"),  # its sample ids are the same
    ]
    points = budget_curves(scores, **BOOTSTRAP)
    found = {(point.benchmark, point.task): (point.interval.mean, point.interval.n) for point in points}
    assert found == {
        ("ruler", "mean"): (0.0, 8),
        ("ruler", "vt"): (0.0, 3),
        ("ruler", "cwe"): (0.0, 5),
        ("boolq", "mean"): (1.0, 3),
        ("boolq", "boolq"): (1.0, 3),
    }


def test_a_metric_of_fewer_examples_has_a_table_of_its_own():
    points = budget_curves(
        [
            *example_scores("kvp", draw(0)),
            *example_scores("kvp", [1.0, 0.0], tasks=("vt", "cwe"), metric="string_match"),
        ],
        **BOOTSTRAP,
    )
    assert {(point.metric, point.interval.n) for point in points if point.task == "mean"} == {
        ("kl", 8),
        ("string_match", 2),
    }


@pytest.mark.parametrize(
    ("metric", "shift", "is_better"),
    [
        ("kl", -0.1, True),
        ("kl", 0.1, False),
        ("kl_answer", -0.1, True),
        ("string_match", 0.1, True),
        ("string_match", -0.1, False),
    ],
)
def test_a_constant_shift_excludes_zero_on_the_right_side(metric, shift, is_better):
    base = 10 * draw(0)  # examples differ by far more than methods: only the pairing shows the shift
    scores = example_scores("kvp", base + shift, metric=metric) + example_scores("knorm", base, metric=metric)
    (comparison,) = compare_with_heuristics(scores, **BOOTSTRAP)
    assert (comparison.heuristic, comparison.budget, comparison.metric) == ("knorm", 64, metric)
    assert comparison.difference.excludes_zero
    assert comparison.is_better is is_better
    ends = (comparison.difference.low, comparison.difference.mean, comparison.difference.high)
    assert ends == pytest.approx((shift,) * 3)


def test_a_difference_within_its_noise_is_not_better():
    scores = example_scores("kvp", draw(0) - 0.01) + example_scores("knorm", draw(1))
    (comparison,) = compare_with_heuristics(scores, **BOOTSTRAP)
    assert comparison.difference.low < 0 < comparison.difference.high
    assert not comparison.is_better


def test_one_example_of_a_task_establishes_nothing():
    tasks = ("vt", "cwe", "cwe")
    scores = example_scores("kvp", [0.0] * 3, tasks=tasks) + example_scores("knorm", [9.0] * 3, tasks=tasks)
    (comparison,) = compare_with_heuristics(scores, **BOOTSTRAP)
    assert comparison.difference.mean == pytest.approx(-9.0)
    assert not comparison.is_better


def test_seeds_of_a_method_are_averaged_before_they_are_compared():
    kvp, random = [draw(0), draw(1)], [draw(seed) for seed in (2, 3, 4)]
    scores = [score for seed, row in enumerate(kvp) for score in example_scores("kvp", row, seed=seed)]
    scores += [score for seed, row in enumerate(random) for score in example_scores("random", row, seed=seed)]
    (comparison,) = compare_with_heuristics(scores, **BOOTSTRAP)
    alone = bootstrap_mean(np.mean(kvp, axis=0) - np.mean(random, axis=0), strata=TASKS, **BOOTSTRAP)
    found = comparison.difference
    assert (found.mean, found.low, found.high) == pytest.approx((alone.mean, alone.low, alone.high))


def test_only_heuristics_are_compared_and_only_where_the_policy_was_judged():
    base = draw(0)
    scores = [score for name in ("kvp", "knorm", "full", "oracle") for score in example_scores(name, base)]
    scores += example_scores("knorm", base, budget=96)
    assert [(entry.heuristic, entry.budget) for entry in compare_with_heuristics(scores, **BOOTSTRAP)] == [
        ("knorm", 64)
    ]
    assert compare_with_heuristics(example_scores("knorm", base), **BOOTSTRAP) == []
    assert compare_with_heuristics([], **BOOTSTRAP) == budget_curves([], **BOOTSTRAP) == []


def test_beating_all_means_every_heuristic_of_that_curve():
    base = draw(0)
    scores = [
        *example_scores("kvp", base, budget=64),
        *example_scores("knorm", base + 1, budget=64),
        *example_scores("tova", base - 1, budget=64),
        *example_scores("kvp", base, budget=128),
        *example_scores("knorm", base + 1, budget=128),
        *example_scores("tova", base + 2, budget=128),
        *example_scores("kvp", base, budget=64, setting="query_aware"),
        *example_scores("knorm", base + 1, budget=64, setting="query_aware"),
    ]
    comparisons = compare_with_heuristics(scores, **BOOTSTRAP)
    assert beats_all(comparisons, setting="query_agnostic", metric="kl") == {64: False, 128: True}
    assert beats_all(comparisons, setting="query_aware", metric="kl") == {64: True}
    assert beats_all(comparisons, setting="query_aware", metric="string_match") == {}


@pytest.mark.parametrize("sample", ["sample-0", "sample-5"])
@pytest.mark.parametrize("function", [budget_curves, compare_with_heuristics])
def test_a_missing_score_is_named(fails_in_one_line, function, sample):
    scores = example_scores("kvp", draw(0)) + example_scores("knorm", draw(1))
    scores = [score for score in scores if (score.sample_id, score.method) != (sample, "knorm")]
    message = fails_in_one_line(function, scores, **BOOTSTRAP)
    assert sample in message
    assert "knorm" in message
    assert "query_agnostic" in message
