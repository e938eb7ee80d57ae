"""Who beats whom: against direct computations, mirrored pairs, and the right side of every metric."""

from math import erf, sqrt

import numpy as np
import pytest

from kvpolicy.evaluation import EvaluateConfig
from kvpolicy.methods.registry import method_names, method_type
from kvpolicy.names import BOUNDS
from kvpolicy.results.budget_curves import resample_scores
from kvpolicy.results.comparisons import BETTER, UNDECIDED, WORSE, beats_all, compare_methods, is_heuristic
from kvpolicy.results.metrics import METRICS
from kvpolicy.results.statistics import Bootstrap
from tests.kvpolicy.example_scores import BOOTSTRAP, TASKS, draw, example_scores

TRAINED = EvaluateConfig(methods=method_names()).trained


def _compare_all(scores, **changes):
    return compare_methods(resample_scores(scores, Bootstrap(**BOOTSTRAP | changes)), TRAINED)


def _compare(scores, **changes):
    """Pair, metric and budget to the comparison."""
    compared = _compare_all(scores, **changes)
    found = {(entry.method, entry.other, entry.metric, entry.budget): entry for entry in compared}
    assert len(found) == len(compared)
    return found


def test_a_difference_and_its_interval_are_those_of_the_paired_scores():
    kvp, knorm = draw(0), draw(1)
    found = _compare(example_scores("kvp", kvp) + example_scores("knorm", knorm))["kvp", "knorm", "kl", 64].difference
    alone = Bootstrap(**BOOTSTRAP).mean(kvp - knorm, strata=TASKS)
    assert (found.mean, found.low, found.high) == pytest.approx((alone.mean, alone.low, alone.high))
    assert (found.n, found.smallest_stratum) == (8, 3)


def test_a_row_has_every_field_as_a_plain_value():
    (found, _) = _compare(example_scores("kvp", draw(0)) + example_scores("knorm", draw(1))).values()
    row, difference = found.to_row(), found.difference
    assert (row["difference"], row["n"]) == (difference.mean, 8)
    assert (row["ci_low"], row["ci_high"]) == (difference.low, difference.high)
    assert row.items() >= {name: value for name, value in vars(found).items() if name != "difference"}.items()


def test_every_pair_is_there_in_both_orders_and_they_mirror():
    names = ("kvp", "random", "knorm", "tova", "full", "oracle")
    scores = [
        score
        for index, name in enumerate(names)
        for budget in (64, 96)
        for score in example_scores(name, draw(10 * index + budget) + index / 3, budget=budget)
    ]
    found = _compare(scores)
    assert len(found) == 2 * len(names) * (len(names) - 1)
    opposite = {BETTER: WORSE, WORSE: BETTER, UNDECIDED: UNDECIDED}
    assert {entry.verdict for entry in found.values()} == set(opposite)
    for (method, other, metric, budget), entry in found.items():
        mirror = found[other, method, metric, budget]
        assert mirror.difference.mean == -entry.difference.mean
        assert mirror.difference.low == pytest.approx(-entry.difference.high)
        assert mirror.confidence == pytest.approx(1 - entry.confidence)
        assert mirror.verdict == opposite[entry.verdict]


@pytest.mark.parametrize("metric", METRICS)
def test_a_constant_shift_is_better_on_the_metrics_own_side(metric):
    base = 10 * draw(0)  # examples differ by far more than methods: only the pairing shows the shift
    better = -0.1 if metric in {"kl", "kl_answer", "perplexity", "missed_mass"} else 0.1
    scores = example_scores("kvp", base + better, metric=metric) + example_scores("knorm", base, metric=metric)
    found = _compare(scores)
    first, second = found["kvp", "knorm", metric, 64], found["knorm", "kvp", metric, 64]
    assert (first.verdict, first.confidence) == (BETTER, 1.0)
    assert (second.verdict, second.confidence) == (WORSE, 0.0)
    ends = (first.difference.low, first.difference.mean, first.difference.high)
    assert ends == pytest.approx((better,) * 3)


def test_confidence_is_the_share_of_resamples_on_the_better_side():
    tasks = ("vt",) * 200
    values = draw(0, tasks)
    values += 1.2 / sqrt(200) * values.std(ddof=1) - values.mean()  # 1.2 standard errors above 0
    scores = example_scores("kvp", np.zeros(200), tasks=tasks) + example_scores("knorm", values, tasks=tasks)
    found = _compare(scores, num_resamples=20_000)["kvp", "knorm", "kl", 64]
    assert found.confidence == pytest.approx((1 + erf(1.2 / sqrt(2))) / 2, abs=0.01)
    assert found.verdict == UNDECIDED


def test_methods_that_do_the_same_are_a_tie():
    # Rounding tells them apart, and must not decide.
    scores = example_scores("kvp", draw(0)) + example_scores("knorm", draw(0)) + example_scores("tova", draw(0) + 1e-15)
    for entry in _compare(scores).values():
        assert (entry.difference.low, entry.difference.mean, entry.difference.high) == (0.0, 0.0, 0.0)
        assert (entry.confidence, entry.verdict) == (0.5, UNDECIDED)


def test_resamples_without_a_difference_count_half():
    scores = example_scores("kvp", [1, 0, 0], tasks=("vt",) * 3, metric="string_match")
    scores += example_scores("knorm", [0, 0, 0], tasks=("vt",) * 3, metric="string_match")
    found = _compare(scores, num_resamples=50_000)["kvp", "knorm", "string_match", 64]
    assert found.difference.low == 0.0
    assert found.verdict == UNDECIDED
    assert found.confidence == pytest.approx(5 / 9 + (4 / 9) / 2, abs=0.01)  # two of three are drawn


def test_one_example_of_a_task_establishes_nothing():
    tasks = ("vt", "cwe", "cwe")
    scores = example_scores("kvp", [0.0] * 3, tasks=tasks) + example_scores("knorm", [9.0] * 3, tasks=tasks)
    found = _compare(scores)["kvp", "knorm", "kl", 64]
    assert found.difference.mean == pytest.approx(-9.0)
    assert (found.confidence, found.verdict) == (0.5, UNDECIDED)


@pytest.mark.parametrize(("count", "verdict"), [(2, UNDECIDED), (5, UNDECIDED), (6, BETTER), (9, BETTER)])
def test_few_examples_establish_nothing_however_they_agree(count, verdict):
    tasks = ("vt",) * count
    scores = example_scores("kvp", [0.0] * count, tasks=tasks) + example_scores("knorm", [9.0] * count, tasks=tasks)
    assert _compare(scores)["kvp", "knorm", "kl", 64].verdict == verdict


@pytest.mark.parametrize(("tasks", "measured"), [(("vt",) * 6, 0.114), (tuple("aaabbbcccdddeeefff"), 0.077)])
def test_ties_are_called_as_often_as_the_module_says(tasks, measured):
    values = np.random.default_rng(0).normal(size=(len(tasks), 2000))
    called = Bootstrap(seed=1, num_resamples=500).resample(values, strata=tasks).intervals()
    share = np.mean([interval.low > 0 or interval.high < 0 for interval in called])
    assert share == pytest.approx(measured, abs=0.025)


def test_seeds_are_averaged_counted_and_drawn():
    kvp, random = [draw(0), draw(1)], [draw(seed) for seed in (2, 3, 4)]
    scores = [score for seed, row in enumerate(kvp) for score in example_scores("kvp", row, seed=seed)]
    scores += [score for seed, row in enumerate(random) for score in example_scores("random", row, seed=seed)]
    scores += example_scores("knorm", draw(5))
    found = _compare(scores)
    entry = found["kvp", "random", "kl", 64]
    difference = np.mean(kvp, axis=0) - np.mean(random, axis=0)
    alone = Bootstrap(**BOOTSTRAP).mean(difference, strata=TASKS)
    assert entry.difference.mean == pytest.approx(alone.mean)
    assert entry.difference.high - entry.difference.low > 1.1 * (alone.high - alone.low)
    assert (entry.num_seeds, entry.other_num_seeds) == (2, 3)
    means = [(row[:3].mean() + row[3:].mean()) / 2 for row in kvp]
    assert entry.seed_std == pytest.approx(abs(means[0] - means[1]) / sqrt(2))
    assert found["knorm", "kvp", "kl", 64].seed_std is None


def test_methods_of_the_same_trainings_meet_the_same_draws():
    """A training that is better helps both, so their difference does not depend on which trainings are drawn."""
    shift = {0: -5.0, 1: 0.0, 2: 7.0}
    scores = [score for seed in shift for score in example_scores("kvp", draw(0) + shift[seed], seed=seed)]
    scores += [score for seed in shift for score in example_scores("kvp_heads", draw(1) + shift[seed], seed=seed)]
    scores += [score for seed in shift for score in example_scores("random", draw(2) + shift[seed], seed=seed)]
    found = _compare(scores)
    entry = found["kvp", "kvp_heads", "kl", 64].difference
    alone = Bootstrap(**BOOTSTRAP).mean(draw(0) - draw(1), strata=TASKS)
    assert (entry.mean, entry.low, entry.high) == pytest.approx((alone.mean, alone.low, alone.high))
    other = found["kvp", "random", "kl", 64].difference
    assert other.high - other.low > 3 * (entry.high - entry.low)


def test_seeds_that_agree_add_nothing_to_an_interval():
    scores = [score for seed in range(3) for score in example_scores("kvp", draw(0), seed=seed)]
    scores += example_scores("knorm", draw(1))
    entry = _compare(scores)["kvp", "knorm", "kl", 64]
    alone = Bootstrap(**BOOTSTRAP).mean(draw(0) - draw(1), strata=TASKS)
    assert (entry.difference.low, entry.difference.high) == pytest.approx((alone.low, alone.high))
    assert entry.seed_std == pytest.approx(0.0, abs=1e-12)


def test_the_best_baseline_is_chosen_at_each_budget():
    base = draw(0)
    scores = [
        *example_scores("kvp", base - 5, budget=64),
        *example_scores("knorm", base + 1, budget=64),
        *example_scores("tova", base + 2, budget=64),
        *example_scores("oracle", base - 9, budget=64),
        *example_scores("kvp", base, budget=96),
        *example_scores("knorm", base + 1, budget=96),
        *example_scores("tova", base - 1, budget=96),
    ]
    best = {(key[3], key[0]): key[1] for key, entry in _compare(scores).items() if entry.is_best_baseline}
    expected = {(64, "kvp"): "knorm", (64, "tova"): "knorm", (64, "oracle"): "knorm"}
    assert best == expected | {(96, "kvp"): "tova", (96, "knorm"): "tova"}


def test_the_full_cache_and_the_oracle_are_rows_but_no_contenders():
    kinds = [method_type(name) for name in method_names()]
    assert tuple(kind.name for kind in kinds if not kind.evicts or kind.needs_importance) == BOUNDS
    assert not is_heuristic("kvp", TRAINED) and not is_heuristic("oracle", TRAINED)
    assert is_heuristic("random", TRAINED) and is_heuristic("snapkv", TRAINED)
    scores = [score for name in ("kvp", "knorm", "full", "oracle") for score in example_scores(name, draw(0))]
    contests = {(entry.method, entry.other) for entry in _compare(scores).values() if entry.is_contest}
    assert contests == {("kvp", "knorm"), ("knorm", "kvp")}


def test_only_methods_at_one_budget_of_one_table_are_compared():
    base = draw(0)
    scores = [
        *example_scores("kvp", base, budget=64),
        *example_scores("knorm", base, budget=96),
        *example_scores("tova", base, budget=64, setting="query_aware"),
        *example_scores("lagkv", base, budget=64, metric="kl_answer"),
        *example_scores("h2o", base, budget=64, benchmark="oasst2"),
    ]
    assert _compare(scores) == _compare([]) == {}


def test_beating_all_means_every_heuristic_of_that_curve():
    base = draw(0)
    scores = [
        *example_scores("kvp", base, budget=64),
        *example_scores("knorm", base + 1, budget=64),
        *example_scores("tova", base - 1, budget=64),
        *example_scores("kvp", base, budget=128),
        *example_scores("knorm", base + 1, budget=128),
        *example_scores("tova", base + 2, budget=128),
        *example_scores("oracle", base - 9, budget=128),
        *example_scores("kvp", base, budget=64, setting="query_aware"),
        *example_scores("knorm", base + 1, budget=64, setting="query_aware"),
    ]
    comparisons = _compare_all(scores)
    agnostic, aware = ("ruler", "query_agnostic", "kl"), ("ruler", "query_aware", "kl")
    assert beats_all(comparisons, TRAINED) == {agnostic: {64: False, 128: True}, aware: {64: True}}
    assert beats_all(comparisons, TRAINED, "tova") == {agnostic: {64: True, 128: False}}
    assert beats_all(comparisons, TRAINED, "snapkv") == {}


def test_a_seed_that_lacks_a_budget_is_named(fails_in_one_line):
    scores = example_scores("kvp", draw(0)) + example_scores("kvp", draw(0), budget=96)
    scores += example_scores("kvp", draw(1), seed=7)
    message = fails_in_one_line(_compare_all, scores)
    assert "kvp" in message and "seed 7" in message and "budget 96" in message


@pytest.mark.parametrize("sample", ["sample-0", "sample-5"])
def test_a_missing_score_is_named(fails_in_one_line, sample):
    scores = example_scores("kvp", draw(0)) + example_scores("knorm", draw(1))
    scores = [score for score in scores if (score.sample_id, score.method) != (sample, "knorm")]
    message = fails_in_one_line(_compare_all, scores)
    assert all(part in message for part in (sample, "knorm", "query_agnostic", "ruler"))
