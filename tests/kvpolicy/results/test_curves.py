"""Budget curves against direct computations; what is never mixed; what must not be missing."""

import numpy as np
import pytest

from kvpolicy.results.budget_curves import budget_curves, resample_scores
from kvpolicy.results.statistics import Bootstrap
from tests.kvpolicy.example_scores import BOOTSTRAP, draw, example_scores


def curves_of(scores, **changes):
    return budget_curves(resample_scores(scores, Bootstrap(**BOOTSTRAP | changes)))


def test_points_are_means_of_tasks_and_the_mean_over_tasks():
    values = {("kvp", 64): draw(0), ("kvp", 96): draw(1), ("knorm", 64): draw(2), ("knorm", 96): draw(3)}
    scores = [score for (method, budget), row in values.items() for score in example_scores(method, row, budget=budget)]
    points = curves_of(scores)
    found = {(point.method, point.budget, point.task): point.interval for point in points}
    assert len(found) == len(points) == 4 * 3
    for (method, budget), row in values.items():
        of_task = {"vt": row[:3], "cwe": row[3:]}
        for task, own in of_task.items():
            interval = found[method, budget, task]
            assert interval.mean == pytest.approx(own.mean())
            assert interval.n == len(own)
            alone = Bootstrap(**BOOTSTRAP).mean(own)
            assert (interval.low, interval.high) == pytest.approx((alone.low, alone.high))
        mean = found[method, budget, "mean"]
        assert mean.mean == pytest.approx((row[:3].mean() + row[3:].mean()) / 2)  # tasks count alike, not examples
        assert mean.low < mean.mean < mean.high
        assert mean.n == 8


def test_the_width_of_an_interval_is_that_of_the_stratified_mean():
    tasks = ("vt",) * 60 + ("cwe",) * 200
    values = draw(0, tasks) * np.where(np.array(tasks) == "vt", 3.0, 0.5)
    points = curves_of(example_scores("kvp", values, tasks=tasks), num_resamples=4000)
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
    points = curves_of(scores)
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
    points = curves_of(scores)
    found = {(point.benchmark, point.task): (point.interval.mean, point.interval.n) for point in points}
    assert found == {
        ("ruler", "mean"): (0.0, 8),
        ("ruler", "vt"): (0.0, 3),
        ("ruler", "cwe"): (0.0, 5),
        ("boolq", "mean"): (1.0, 3),
        ("boolq", "boolq"): (1.0, 3),
    }


def test_a_metric_of_fewer_examples_has_a_table_of_its_own():
    points = curves_of(
        [
            *example_scores("kvp", draw(0)),
            *example_scores("kvp", [1.0, 0.0], tasks=("vt", "cwe"), metric="string_match"),
        ]
    )
    assert {(point.metric, point.interval.n) for point in points if point.task == "mean"} == {
        ("kl", 8),
        ("string_match", 2),
    }


def test_no_scores_make_no_points():
    assert curves_of([]) == []


@pytest.mark.parametrize("sample", ["sample-0", "sample-5"])
def test_a_missing_score_is_named(fails_in_one_line, sample):
    scores = example_scores("kvp", draw(0)) + example_scores("knorm", draw(1))
    scores = [score for score in scores if (score.sample_id, score.method) != (sample, "knorm")]
    message = fails_in_one_line(curves_of, scores)
    assert all(part in message for part in (sample, "knorm", "query_agnostic", "ruler"))
