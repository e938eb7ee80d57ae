"""Intervals: what they cover, what they pair, and what they refuse."""

import time

import numpy as np
import pytest

from kvpolicy.errors import InputError
from kvpolicy.results.statistics import Bootstrap

SIX_TASKS = [f"task {index % 6}" for index in range(60)]


def test_mean_and_interval_of_a_known_sample():
    values = np.arange(100.0)
    interval = Bootstrap(seed=0, num_resamples=20_000).mean(values)
    error = values.std(ddof=1) / 10
    assert interval.mean == pytest.approx(49.5)
    assert interval.low == pytest.approx(49.5 - 1.96 * error, abs=0.15)
    assert interval.high == pytest.approx(49.5 + 1.96 * error, abs=0.15)
    assert (interval.n, interval.smallest_stratum) == (100, 100)


def test_strata_weigh_alike_whatever_their_size():
    values = np.array([0.0] * 9 + [1.0])
    assert Bootstrap(seed=0).mean(values, strata=["a"] * 9 + ["b"]).mean == pytest.approx(0.5)


def test_resampling_stays_within_strata():
    values = np.array([0.0, 0.0, 0.0, 100.0, 100.0, 100.0])
    interval = Bootstrap(seed=0).mean(values, strata=list("aaabbb"))
    assert (interval.low, interval.high) == (50.0, 50.0)
    assert Bootstrap(seed=0).mean(values).high > 60


@pytest.mark.parametrize(
    ("num_examples", "strata"), [(60, None), (60, SIX_TASKS), (30, SIX_TASKS[:30])], ids=["one", "tens", "fives"]
)
def test_95_percent_intervals_cover_the_truth_95_percent_of_the_time(num_examples, strata):
    # 3,000 samples of a known distribution, one a column; the standard error of the coverage is 0.4 %. Percentile
    # intervals of few examples are a little short, which the lower bound allows for.
    offsets = np.zeros(num_examples) if strata is None else np.array([float(name[-1]) for name in strata])
    values = np.random.default_rng(1).normal(size=(num_examples, 3_000)) + offsets[:, None]
    truth = 0.0 if strata is None else 2.5
    table = Bootstrap(seed=2).resample(values, strata=strata).intervals()
    coverage = np.mean([interval.low <= truth <= interval.high for interval in table])
    assert 0.93 <= coverage <= 0.965


@pytest.mark.parametrize("size", [2, 3, 10])
def test_variance_is_right_in_small_strata(size):
    # Drawing all m examples of a stratum would understate it by (m - 1) / m.
    names = [f"s{index // size}" for index in range(20 * size)]
    values = np.random.default_rng(3).normal(size=20 * size)
    interval = Bootstrap(seed=0, num_resamples=20_000, confidence=0.6827).mean(values, strata=names)
    half_width = (interval.high - interval.low) / 2
    by_stratum = values.reshape(20, size)
    expected = np.sqrt((by_stratum.var(axis=1, ddof=1) / size).sum()) / 20
    assert half_width == pytest.approx(expected, rel=0.04)


def test_pairing_removes_what_examples_share():
    generator = np.random.default_rng(0)
    hard = generator.normal(scale=10.0, size=60)
    a = hard + 0.5 + generator.normal(scale=0.1, size=60)
    interval = Bootstrap(seed=0).mean(a - hard, strata=SIX_TASKS)
    assert interval.excludes_zero
    assert interval.mean == pytest.approx(0.5, abs=0.05)
    assert not Bootstrap(seed=0).mean(a, strata=SIX_TASKS).excludes_zero


def test_columns_of_a_table_share_their_resamples():
    values = np.random.default_rng(0).normal(size=(60, 3))
    values[:, 2] = values[:, 0] - values[:, 1]
    table = Bootstrap(seed=7).resample(values, strata=SIX_TASKS).intervals()
    alone = Bootstrap(seed=7).mean(values[:, 0], strata=SIX_TASKS)
    paired = Bootstrap(seed=7).mean(values[:, 0] - values[:, 1], strata=SIX_TASKS)
    for column, own in ((0, alone), (2, paired)):
        interval = table[column]
        assert (interval.mean, interval.low, interval.high) == pytest.approx((own.mean, own.low, own.high))


def test_a_seed_repeats_and_another_differs():
    values = np.random.default_rng(0).normal(size=40)
    assert Bootstrap(seed=1).mean(values) == Bootstrap(seed=1).mean(values)
    assert Bootstrap(seed=1).mean(values) != Bootstrap(seed=2).mean(values)


def test_a_wider_confidence_is_a_wider_interval():
    values = np.random.default_rng(0).normal(size=40)
    narrow, wide = (Bootstrap(seed=1, confidence=confidence).mean(values) for confidence in (0.8, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_example_has_no_width_and_proves_nothing():
    interval = Bootstrap(seed=0).mean(np.array([3.0]))
    assert (interval.mean, interval.low, interval.high, interval.n) == (3.0, 3.0, 3.0, 1)
    assert not interval.excludes_zero
    assert not Bootstrap(seed=0).mean(np.array([3.0, 4.0, 5.0]), strata=["a", "a", "b"]).excludes_zero


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3])
def test_equal_values_have_an_interval_of_no_width(value):
    interval = Bootstrap(seed=0).mean(np.full(60, value), strata=SIX_TASKS)
    assert interval.high - interval.low < 1e-14
    assert interval.mean == pytest.approx(value)
    assert interval.excludes_zero == (value != 0.0)


def test_two_hundred_columns_take_a_moment():
    values = np.random.default_rng(0).normal(size=(60, 200))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        Bootstrap(seed=0).resample(values, strata=SIX_TASKS).intervals()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(InputError, match="1 of 3 values are not finite"):
        Bootstrap(seed=0).mean(np.array([1.0, bad, 2.0]))


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        (np.zeros(0), {}, "no examples"),
        (np.zeros(3), {"num_resamples": 0}, "num_resamples is 0"),
        (np.zeros(3), {"confidence": 1.0}, "confidence is 1.0"),
        (np.zeros(3), {"confidence": float("nan")}, "confidence is nan"),
    ],
)
def test_wrong_arguments_are_refused(values, arguments, message):
    with pytest.raises(InputError, match=message):
        Bootstrap(seed=0, **arguments).mean(values)


def test_each_example_has_a_stratum():
    with pytest.raises(InputError, match="1 strata for 3 examples"):
        Bootstrap(seed=0).mean(np.zeros(3), strata=["a"])


def _crossed(num_units, num_examples, *, unit_std, example_std, noise_std, num_columns, seed):
    """Values of units x examples x columns whose true mean is 0, as columns of a table, and where each unit's are."""
    generator = np.random.default_rng(seed)
    values = (
        unit_std * generator.normal(size=(1, num_units, num_columns))
        + example_std * generator.normal(size=(num_examples, 1, num_columns))
        + noise_std * generator.normal(size=(num_examples, num_units, num_columns))
    )
    columns = np.arange(num_units * num_columns).reshape(num_units, num_columns)
    return values.reshape(num_examples, -1), columns


@pytest.mark.parametrize(("unit_std", "example_std"), [(1.0, 0.0), (0.0, 1.0), (0.3, 2.0)])
def test_intervals_over_units_and_examples_cover_the_truth(unit_std, example_std):
    values, columns = _crossed(
        20, 60, unit_std=unit_std, example_std=example_std, noise_std=0.2, num_columns=400, seed=1
    )
    resamples = Bootstrap(seed=3).average_units(
        Bootstrap(seed=2, num_resamples=1000).resample(values), {"kvp": columns}
    )
    table = resamples.intervals()
    np.testing.assert_allclose([interval.mean for interval in table], values.reshape(60, 20, 400).mean(axis=(0, 1)))
    coverage = np.mean([interval.low <= 0 <= interval.high for interval in table])
    assert 0.89 <= coverage <= 0.98  # percentiles of twenty units are a little short; 400 columns give +- 1.1 %


def test_the_variance_over_few_units_is_right():
    # Three seeds that differ and examples that do not: drawing three of three would give two thirds of the variance.
    values = np.tile(np.array([1.0, 2.0, 6.0]), (10, 1))
    bootstrap = Bootstrap(seed=0, num_resamples=40_000)
    averaged = bootstrap.average_units(bootstrap.resample(values), {"kvp": np.array([[0], [1], [2]])})
    assert averaged.deviation.std() == pytest.approx(np.std([1, 2, 6], ddof=1) / np.sqrt(3), rel=0.02)


def test_groups_draw_their_units_independently_and_all_their_columns_alike():
    values = np.tile(np.array([1.0, 3.0]), (10, 3))
    bootstrap = Bootstrap(seed=0, num_resamples=4_000, confidence=0.9)
    groups = {"kvp": np.array([[0, 2], [1, 3]]), "random": np.array([[4], [5]])}
    averaged = bootstrap.average_units(bootstrap.resample(values), groups)
    np.testing.assert_allclose(averaged.deviation[:, 0], averaged.deviation[:, 1])
    assert abs(np.corrcoef(averaged.deviation[:, 0], averaged.deviation[:, 2])[0, 1]) < 0.06
    same = averaged.differences(np.array([0]), np.array([1]))
    assert same.intervals()[0].high == 0.0
    assert same.share_above_zero().tolist() == [0.5]


def test_noise_of_single_pairs_is_overstated_up_to_three_times_and_never_understated():
    values, columns = _crossed(20, 60, unit_std=0.0, example_std=0.0, noise_std=1.0, num_columns=200, seed=5)
    bootstrap = Bootstrap(seed=0, num_resamples=500)
    averaged = bootstrap.average_units(bootstrap.resample(values), {"kvp": columns})
    found = averaged.deviation.var(axis=0).mean() / (1 / (20 * 60))
    assert 2.5 < found < 3.2
