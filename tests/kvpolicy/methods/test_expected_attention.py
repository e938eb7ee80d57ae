"""Expected Attention against its formulas in float64, token by token, and against Gaussian queries that are drawn."""

import math

import numpy as np
import pytest
import torch

from kvpolicy.errors import InputError
from kvpolicy.methods import expected_attention as module
from kvpolicy.methods.expected_attention import ExpectedAttention, expected_logits, query_statistics
from kvpolicy.models.rotary import Rotary


def _rotation(rotary, position, dim):
    """The matrix that turns a state to a position."""
    matrix = np.eye(dim)
    frequencies, magnitude = rotary.frequencies[0].tolist(), float(rotary.magnitudes[0])
    for pair, frequency in enumerate(frequencies):
        other = pair + len(frequencies)
        cos, sin = (magnitude * part(position * frequency) for part in (math.cos, math.sin))
        matrix[pair, pair], matrix[pair, other], matrix[other, pair], matrix[other, other] = cos, -sin, sin, cos
    return matrix


def _expected_scores(state, head, *, num_future, num_sinks, epsilon):
    dim, positions = state.keys.shape[2], state.positions[head % len(state.positions)].tolist()
    keys, values = state.keys[head].double().numpy(), state.values[head].double().numpy()
    last = positions[-1]
    mean_rotation = np.mean([_rotation(state.rotary, last + 1 + step, dim) for step in range(num_future)], axis=0)
    count = state.num_queries
    attention = np.zeros(len(positions))
    ranked = [i for i, position in enumerate(positions) if position >= num_sinks]
    for member in range(state.queries.shape[1]):
        queries = []
        for index in range(count):
            position = last - count + 1 + index
            if position >= num_sinks:
                rotation = _rotation(state.rotary, position, dim)
                queries.append(np.linalg.inv(rotation) @ state.queries[head, member, index].double().numpy())
        mean = np.mean(queries, axis=0)
        covariance = np.mean([np.outer(q - mean, q - mean) for q in queries], axis=0)
        mean, covariance = mean_rotation @ mean, mean_rotation @ covariance @ mean_rotation.T
        s = state.scaling.factor
        terms = {i: math.exp(s * keys[i] @ mean + s * s / 2 * keys[i] @ covariance @ keys[i]) for i in ranked}
        for i in ranked:
            attention[i] += terms[i] / sum(terms.values()) / state.queries.shape[1]
    return ranked, (attention + epsilon) * np.linalg.norm(values, axis=1)


@pytest.mark.parametrize("num_queries", [None, 17, 1])
@pytest.mark.parametrize("pairs", [3, 2], ids=["whole", "partial"])
@pytest.mark.parametrize("block_bytes", [1, 2**26])
def test_scores_are_the_formula(make_state, monkeypatch, num_queries, pairs, block_bytes):
    monkeypatch.setattr(module, "_MAX_BLOCK_BYTES", block_bytes)
    state = make_state(30, dim=6, num_queries=num_queries)
    rotary = Rotary(frequencies=torch.tensor([[1.0, 0.3, 0.01]])[:, :pairs], magnitudes=torch.tensor([1.2]))
    state = type(state)(**{**vars(state), "rotary": rotary})
    scores = ExpectedAttention(num_future_positions=9, num_sink_tokens=3, epsilon=0.02).score(state)
    for head in range(4):
        ranked, expected = _expected_scores(state, head, num_future=9, num_sinks=3, epsilon=0.02)
        np.testing.assert_allclose(scores[head, 3:], expected[ranked], rtol=1e-4)
        assert scores[head, :3].min() > scores[head, 3:].max()


def test_scores_of_a_cache_that_was_compacted_go_by_original_positions(make_state):
    state = make_state(12, num_queries=8)
    positions = torch.tensor([[0, 2, 7, 9, *range(32, 40)], [1, 3, 4, 5, *range(32, 40)]]).repeat(2, 1)
    state = type(state)(**{**vars(state), "positions": positions, "importance": None})
    scores = ExpectedAttention(num_future_positions=9, epsilon=0.0).score(state)
    for head in range(4):
        ranked, expected = _expected_scores(state, head, num_future=9, num_sinks=4, epsilon=0.0)
        np.testing.assert_allclose(scores[head, ranked], expected[ranked], rtol=1e-4)
        sinks = [i for i in range(12) if i not in ranked]
        assert scores[head, sinks].min() > scores[head, ranked].max()


def test_the_logarithm_of_the_mean_over_drawn_queries_is_the_expected_logit():
    generator = torch.Generator().manual_seed(0)
    dim, scaling = 4, 0.5
    mean = torch.randn(1, 1, dim, generator=generator)
    factor = torch.randn(dim, dim, generator=generator) * 0.7
    keys = torch.randn(1, 6, dim, generator=generator)
    drawn = mean[0, 0] + torch.randn(400_000, dim, generator=generator) @ factor.T
    found = expected_logits(mean, (factor @ factor.T)[None, None], keys, scaling=scaling)[0, 0]
    logits = (scaling * drawn @ keys[0].T).exp()
    error = logits.std(dim=0) / logits.mean(dim=0) / math.sqrt(len(drawn))
    assert ((logits.mean(dim=0).log() - found).abs() < 4 * error).all()
    assert (found - scaling * keys[0] @ mean[0, 0]).min() > 0.05  # the covariance matters here


def test_statistics_are_those_of_the_queries_that_count():
    queries = torch.randn(2, 3, 50, 4, generator=torch.Generator().manual_seed(0))
    counted = torch.arange(50).expand(2, -1) >= 4
    mean, covariance = query_statistics(queries, counted)
    torch.testing.assert_close(mean, queries[:, :, 4:].mean(dim=2))
    expected = torch.cov(queries[1, 2, 4:].T, correction=0)
    torch.testing.assert_close(covariance[1, 2], expected)
    everything = query_statistics(queries, torch.zeros(2, 50, dtype=torch.bool))
    torch.testing.assert_close(everything[0], queries.mean(dim=2))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5])
def test_a_context_of_sinks_is_ranked_as_it_lies(make_state, num_tokens):
    scores = ExpectedAttention().score(make_state(num_tokens))
    assert scores.isfinite().all()
    assert scores[0].argsort(descending=True, stable=True).tolist() == list(range(num_tokens))


def test_what_is_missing_is_named(make_state):
    state = make_state(30)
    with pytest.raises(InputError, match="no rotary embedding in the cache state"):
        ExpectedAttention().score(type(state)(**{**vars(state), "rotary": None}))
    with pytest.raises(InputError, match="no queries in the cache state"):
        ExpectedAttention().score(make_state(30, num_queries=0))


def test_bfloat16_stays_near_float32(make_state):
    state = make_state(200, dtype=torch.bfloat16)
    exact = type(state)(
        **{**vars(state), **{part: getattr(state, part).float() for part in ("keys", "queries", "values")}}
    )
    torch.testing.assert_close(ExpectedAttention().score(state), ExpectedAttention().score(exact))
