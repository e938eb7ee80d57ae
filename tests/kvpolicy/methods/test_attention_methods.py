"""Methods that look at attention, each against a softmax written out query by query in float64."""

import numpy as np
import pytest
import torch

from kvpolicy.errors import InputError
from kvpolicy.methods.observed_attention import observed_attention
from kvpolicy.methods.registry import make_method
from kvpolicy.methods.snapkv import SnapKV


def _attention(state, head: int, member: int, token: int) -> np.ndarray:
    """Weights of one query head's query at a token index, over all tokens (those it cannot see get 0)."""
    query = state.queries[head, member, token - state.num_tokens].double().numpy()
    logits = state.keys[head, : token + 1].double().numpy() @ query * state.scaling.factor
    weights = np.zeros(state.num_tokens)
    weights[: token + 1] = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("max_block_bytes", [1, 700, 5_000, 2**30])
def test_observed_attention_equals_the_softmax_at_every_block_size(make_state, group, max_block_bytes):
    state = make_state(11, group=group)
    for count in (1, 4, 11, 50):
        total = observed_attention(state, count, method="test", max_block_bytes=max_block_bytes)
        for head in range(4):
            for member in range(group):
                expected = sum(_attention(state, head, member, token) for token in range(11 - min(count, 11), 11))
                np.testing.assert_allclose(total[head, member], expected, atol=1e-5)


def test_observed_attention_spans_several_blocks_of_queries(make_state):
    state = make_state(150, num_layers=1)
    total = observed_attention(state, 150, method="test")
    expected = sum(_attention(state, 1, 2, token) for token in range(150))
    np.testing.assert_allclose(total[1, 2], expected, atol=1e-4)


@pytest.mark.parametrize("max_block_bytes", [1, 700, 2**30])
def test_observed_attention_sees_by_position_where_tokens_are_gone(make_state, max_block_bytes):
    """Every head lost other tokens, among them some whose queries are here."""
    state = make_state(12, num_queries=6)
    positions = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(i))[:11] for i in range(4)])
    positions = torch.cat([positions.sort(dim=1).values, torch.full((4, 1), 20)], dim=1)
    compacted = type(state)(**{**vars(state), "positions": positions})
    for count in (1, 4, 6):
        total = observed_attention(compacted, count, method="test", max_block_bytes=max_block_bytes)
        for head in range(4):
            for member in range(3):
                expected = np.zeros(12)
                for back in range(count):
                    logits = state.keys[head].double().numpy() @ state.queries[head, member, 5 - back].double().numpy()
                    seen = positions[head].numpy() <= 20 - back
                    weights = np.where(seen, np.exp(logits * state.scaling.factor), 0)
                    expected += weights / weights.sum()
                np.testing.assert_allclose(total[head, member], expected, atol=1e-5)


@pytest.mark.parametrize("num_queries", [5, 13])
def test_snapkv_pools_the_mean_attention_of_the_window(make_state, num_queries):
    num_tokens, window, kernel = 13, 5, 3
    state = make_state(num_tokens, num_queries=num_queries)
    scores = SnapKV(window_tokens=window, kernel=kernel).score(state)
    for head in range(4):
        expected = np.zeros(num_tokens - window)
        for member in range(3):
            weights = [_attention(state, head, member, token) for token in range(num_tokens - window, num_tokens)]
            mean = np.mean(weights, axis=0)[: num_tokens - window]
            for token in range(num_tokens - window):
                near = [mean[i] for i in range(token - 1, token + 2) if 0 <= i < num_tokens - window]
                expected[token] += sum(near) / kernel / 3
        np.testing.assert_allclose(scores[head, :-window], expected, atol=1e-6)
        recent = scores[head, -window:].tolist()
        assert recent == sorted(recent)
        assert recent[0] > scores[head, :-window].max()


@pytest.mark.parametrize("num_tokens", [1, 30, 64])
def test_snapkv_is_recency_where_the_window_covers_the_context(make_state, num_tokens):
    scores = make_method("snapkv").score(make_state(num_tokens))
    assert scores[0].argsort(descending=True).tolist() == list(range(num_tokens - 1, -1, -1))


@pytest.mark.parametrize("num_tokens", [65, 66, 70])
def test_snapkv_pools_fewer_earlier_tokens_than_its_kernel(make_state, num_tokens):
    scores = make_method("snapkv").score(make_state(num_tokens))
    assert scores.isfinite().all()
    assert scores[:, :-64].max() < scores[:, -64:].min()


def test_tova_averages_the_last_query_over_all_heads_of_a_layer(make_state):
    state = make_state(9, num_queries=1)
    scores = make_method("tova").score(state)
    for layer in range(2):
        heads = (2 * layer, 2 * layer + 1)
        expected = np.mean([_attention(state, head, member, 8) for head in heads for member in range(3)], axis=0)
        for head in heads:
            np.testing.assert_allclose(scores[head, :-1], expected[:-1], atol=1e-6)
            assert scores[head, -1] > scores[head, :-1].max()
    assert not torch.equal(scores[0], scores[2])


def test_h2o_divides_by_the_queries_that_could_see_a_token(make_state):
    state = make_state(9)
    scores = make_method("h2o").score(state)
    for head in range(4):
        for token in range(9):
            received = [
                _attention(state, head, member, query)[token] for member in range(3) for query in range(token, 9)
            ]
            assert scores[head, token].item() == pytest.approx(np.mean(received), abs=1e-6)


def test_h2o_refuses_a_part_of_the_queries(make_state):
    with pytest.raises(InputError, match="8 queries for 9 tokens"):
        make_method("h2o").score(make_state(9, num_queries=8))


@pytest.mark.parametrize("name", ["snapkv", "tova"])
def test_missing_queries_are_named(make_state, name):
    with pytest.raises(InputError, match=f"method {name}: 0 queries recorded"):
        make_method(name).score(make_state(100, num_queries=0))


@pytest.mark.parametrize("name", ["snapkv", "tova", "h2o"])
def test_heads_of_one_layer_know_nothing_of_other_layers(make_state, name):
    state = make_state(70)
    swapped = type(state)(
        **{
            **vars(state),
            **{part: getattr(state, part).roll(2, dims=0) for part in ("keys", "values", "queries", "importance")},
        }
    )
    torch.testing.assert_close(make_method(name).score(swapped), make_method(name).score(state).roll(2, dims=0))


def test_attention_survives_bfloat16(make_state):
    state = make_state(200, dtype=torch.bfloat16)
    exact = type(state)(
        **{**vars(state), **{part: getattr(state, part).float() for part in ("keys", "queries", "values")}}
    )
    for name in ("snapkv", "tova", "h2o", "keydiff", "knorm", "lagkv"):
        torch.testing.assert_close(make_method(name).score(state), make_method(name).score(exact))
