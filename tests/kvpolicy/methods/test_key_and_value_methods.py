"""Methods that look at positions, keys and values, each against its formula written out token by token."""

import math

import pytest
import torch

from kvpolicy.errors import InputError
from kvpolicy.methods.lagkv import LagKV
from kvpolicy.methods.random import Random
from kvpolicy.methods.registry import make_method


def test_knorm_is_the_negative_norm(make_state):
    state = make_state(7)
    scores = make_method("knorm").score(state)
    for head, keys in enumerate(state.keys.tolist()):
        for token, key in enumerate(keys):
            assert scores[head, token].item() == pytest.approx(-math.sqrt(sum(x * x for x in key)), rel=1e-5)


def test_keydiff_is_the_negative_cosine_with_the_mean_unit_key(make_state):
    state = make_state(7)
    scores = make_method("keydiff").score(state)
    for head, keys in enumerate(state.keys.tolist()):
        units = [[x / math.hypot(*key) for x in key] for key in keys]
        anchor = [sum(unit[channel] for unit in units) / len(units) for channel in range(4)]
        for token, key in enumerate(keys):
            dot = sum(x * y for x, y in zip(key, anchor, strict=True))
            assert scores[head, token].item() == pytest.approx(
                -dot / (math.hypot(*key) * math.hypot(*anchor)), abs=1e-5
            )


def test_keydiff_anchor_weighs_directions_not_norms(make_state):
    state = make_state(5, num_layers=1, num_kv_heads=1)
    longer = state.keys.clone()
    longer[0, 0] *= 50
    scaled = type(state)(**{**vars(state), "keys": longer})
    torch.testing.assert_close(make_method("keydiff").score(scaled), make_method("keydiff").score(state))


def test_streaming_llm_ranks_sinks_then_recency(make_state):
    scores = make_method("streaming_llm").score(make_state(10))
    for head in range(4):
        assert scores[head].argsort(descending=True).tolist() == [0, 1, 2, 3, 9, 8, 7, 6, 5, 4]


def test_streaming_llm_tells_sinks_by_original_position(make_state):
    state = make_state(6)
    compacted = type(state)(**{**vars(state), "positions": torch.tensor([[1, 3, 20, 21, 40, 41]])})
    assert make_method("streaming_llm").score(compacted)[0].argsort(descending=True).tolist() == [0, 1, 5, 4, 3, 2]


def test_streaming_llm_reads_the_positions_of_each_head(make_state):
    positions = torch.tensor([[1, 3, 20, 41], [0, 2, 3, 41], [9, 10, 11, 41], [2, 4, 5, 41]])
    compacted = type(make_state(4))(**{**vars(make_state(4)), "positions": positions})
    orders = make_method("streaming_llm").score(compacted).argsort(descending=True).tolist()
    assert orders == [[0, 1, 3, 2], [0, 1, 2, 3], [3, 2, 1, 0], [0, 3, 2, 1]]


def test_random_differs_between_heads_layers_and_samples_and_repeats_with_the_seed(make_state):
    method = Random()
    first, again, other = (method.score(make_state(64, seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    orders = {tuple(order) for order in first.argsort(dim=-1).tolist()}
    assert len(orders) == 4


def test_random_reads_all_bits_of_a_seed(make_state):
    # torch's CPU generator alone gives these two seeds one sequence.
    low, high = (Random().score(make_state(64, seed=seed)) for seed in (5, 5 + 2**40))
    assert not torch.equal(low, high)


def test_random_leaves_the_global_generator_alone(make_state):
    state = make_state()
    before = torch.random.get_rng_state()
    Random().score(state)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_oracle_is_the_importance_and_needs_it(make_state):
    state = make_state()
    assert torch.equal(make_method("oracle").score(state), state.importance)
    blind = type(state)(**{**vars(state), "importance": None})
    with pytest.raises(InputError, match="no importance"):
        make_method("oracle").score(blind)


def _lag_softmax(states: list[list[float]], following: list[list[float]]) -> list[float]:
    dim = len(states[0])
    low = [min(row[c] for row in following) for c in range(dim)]
    high = [max(row[c] for row in following) for c in range(dim)]
    spreads = []
    for row in states:
        scaled = [(row[c] - low[c]) / (high[c] - low[c]) for c in range(dim)]
        mean = sum(scaled) / dim
        spreads.append(math.sqrt(sum((x - mean) ** 2 for x in scaled) / (dim - 1)))
    exponentials = [math.exp(spread) for spread in spreads]
    return [x / sum(exponentials) for x in exponentials]


@pytest.mark.parametrize(("num_tokens", "lag", "dim"), [(14, 4, 4), (17, 4, 4), (19, 4, 4), (240, 32, 2)])
def test_lagkv_ranks_within_partitions_by_the_next_one(make_state, num_tokens, lag, dim):
    sinks = 2
    state = make_state(num_tokens, dim=dim)
    scores = LagKV(num_sink_tokens=sinks, lag_tokens=lag).score(state)
    partitions = (num_tokens - sinks) // lag
    for head in range(4):
        keys, values = state.keys[head].tolist(), state.values[head].tolist()
        for part in range(partitions - 1):
            here = slice(sinks + part * lag, sinks + (part + 1) * lag)
            after = slice(here.stop, here.stop + lag)
            by_key, by_value = _lag_softmax(keys[here], keys[after]), _lag_softmax(values[here], values[after])
            averaged = [(a + b) / 2 for a, b in zip(by_key, by_value, strict=True)]
            ranks = [sum(other < own for other in averaged) / lag for own in averaged]
            assert scores[head, here].tolist() == pytest.approx(ranks)
        window = scores[head, sinks + (partitions - 1) * lag :].tolist()
        assert window == sorted(window)
        assert len(set(window)) == len(window)
        assert min(window) >= 1 > scores[head, sinks : sinks + (partitions - 1) * lag].max()
        assert scores[head, :sinks].min() > max(window)


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9])
def test_lagkv_is_recency_where_the_context_is_too_short(make_state, num_tokens):
    scores = LagKV(num_sink_tokens=2, lag_tokens=4).score(make_state(num_tokens))
    sinks = min(2, num_tokens)
    expected = [*range(sinks), *range(num_tokens - 1, sinks - 1, -1)]
    for row in scores:
        assert torch.argsort(row, descending=True, stable=True).tolist() == expected


def test_lagkv_takes_channels_that_do_not_vary(make_state):
    state = make_state(30)
    state.keys[..., 0] = 1.0
    state.values.zero_()
    assert LagKV(num_sink_tokens=2, lag_tokens=4).score(state).isfinite().all()
