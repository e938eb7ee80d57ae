"""The analysis of an example: what it finds is bounded, complete, and right where the answer is known."""

import math
from collections import Counter
from itertools import product

import pytest

from kvpolicy.evaluation import analyse_example, evaluate_example
from kvpolicy.text.encoded_sample import encode
from kvpolicy.text.sample import Sample

BUDGETS = (24, 33, 48)
SETTINGS = ("query_agnostic", "query_aware")
NAMES = ("kvp", "knorm", "random", "full", "oracle")


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def example(model):
    sample = Sample(
        sample_id="ruler/niah_single_1/test/0/0/200",
        benchmark="ruler",
        task="niah_single_1",
        split="test",
        context="A special magic number is hidden in this text: 4821. Keep it well.",
        question=" What is it?",
        answer_prefix=" The number is",
        answer=" 4821.",
        references=("4821",),
        max_new_tokens=24,
    )
    return encode(sample, model.tokenizer)


@pytest.fixture
def result(model, example, make_contenders):
    return analyse_example(model, example, make_contenders(model, NAMES), BUDGETS, settings=SETTINGS, num_left_out=12)


def test_there_is_everything_once(result):
    scores = Counter((s.setting, s.method, s.budget, s.metric) for s in result.scores)
    assert set(scores) == {
        (setting, name, budget, metric)
        for setting in SETTINGS
        for name in NAMES
        if name != "full"
        for budget in BUDGETS
        for metric in ("missed_mass", "reward_correlation")
    }
    pairs = {(24, 33), (24, 48), (33, 48)}
    findings = Counter(
        (f.setting, f.analysis, f.quantity, f.method, f.budget, f.larger_budget) for f in result.findings
    )
    nested = {
        (setting, "nestedness", quantity, "oracle", *pair)
        for setting in SETTINGS
        for quantity in ("overlap", "excess_missed_mass")
        for pair in pairs
    }
    left_out = {
        (setting, "leave_one_out", "spearman", name, None, None)
        for setting in SETTINGS
        for name in NAMES
        if name != "full"
    }
    assert set(findings) == nested | left_out
    assert set(scores.values()) == set(findings.values()) == {1}


def test_figures_lie_where_they_must(result):
    for score in result.scores:
        low = 0 if score.metric == "missed_mass" else -1
        assert low <= score.value <= 1
    for finding in result.findings:
        assert (-1 if finding.quantity == "spearman" else 0) <= finding.value <= 1
        assert not math.isnan(finding.value)


def test_the_oracle_misses_least_and_less_with_more_budget(result):
    missed = {(s.setting, s.method, s.budget): s.value for s in result.scores if s.metric == "missed_mass"}
    for setting in SETTINGS:
        for budget in BUDGETS:
            own = missed[setting, "oracle", budget]
            assert all(own <= missed[setting, name, budget] + 1e-6 for name in NAMES if name != "full")
        assert missed[setting, "oracle", 24] >= missed[setting, "oracle", 33] >= missed[setting, "oracle", 48]


def test_what_keeps_everything_misses_nothing_and_changes_no_order(model, example, make_contenders):
    whole = len(example.context_ids)
    result = analyse_example(
        model, example, make_contenders(model, ["knorm"]), [whole], settings=SETTINGS[:1], num_left_out=4
    )
    figures = {score.metric: score.value for score in result.scores}
    assert figures["missed_mass"] == 0
    assert figures["reward_correlation"] == pytest.approx(1, abs=1e-3)


def test_rankings_keep_what_missed_the_mass_that_the_scores_say(model, example, make_contenders, result):
    contenders = make_contenders(model, NAMES)
    asked = {"settings": SETTINGS, "generate": False, "keep_rankings": True}
    rankings = evaluate_example(model, example, contenders, BUDGETS, **asked).rankings
    missed = {(s.setting, s.method, s.budget): s.value for s in result.scores if s.metric == "missed_mass"}
    names = {(own.setting, own.method) for own in rankings}
    assert len(names) == len(rankings)
    assert names == set(product(SETTINGS, set(NAMES) - {"full"}))
    for own in rankings:
        total = own.importance.sum(dim=1)
        for place, budget in enumerate(BUDGETS):
            kept = own.ranks <= own.kept[place][:, None]
            assert kept.sum() == budget * len(total)
            lost = 1 - (own.importance * kept).sum(dim=1) / total
            assert float(lost.mean()) == pytest.approx(missed[own.setting, own.method, budget], abs=1e-5)
    assert not evaluate_example(model, example, contenders, BUDGETS, **{**asked, "keep_rankings": False}).rankings
