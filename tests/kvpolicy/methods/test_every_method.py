"""What holds for every registered method, and the traps of selection that methods fall into together."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, kept_by_method
from kvpolicy.methods.registry import make_method, method_names, method_type
from kvpolicy.methods.streaming_llm import StreamingLLM
from kvpolicy.ranking import NOT_KEPT, kept_positions

NAMES = ("kvp", "random", "streaming_llm", "knorm", "keydiff", "lagkv", "snapkv", "tova", "h2o", "full", "oracle")


def test_names_are_in_the_order_of_tables():
    assert method_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_method_describes_itself(name):
    method = method_type(name)
    assert method.name == name
    assert "\n" not in method.description
    assert method.reference == "none" or method.reference.startswith("arXiv ")
    assert dataclasses.is_dataclass(method)
    assert method.evicts == (name != "full")
    assert method.needs_importance == (name == "oracle")
    assert method.recompression_obstacle is None or "\n" not in method.recompression_obstacle


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [(2, 3), (1, 4), (3, 1)], ids=["gqa", "mqa", "mha"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_scores_are_finite_and_one_a_head_and_token(make_state, make_any, name, heads, dtype):
    num_kv_heads, group = heads
    for num_tokens in (1, 20, 300):
        state = make_state(num_tokens, num_kv_heads=num_kv_heads, group=group, dtype=dtype)
        scores = make_any(name).score(state)
        assert scores.shape == (2 * num_kv_heads, num_tokens)
        assert scores.dtype == torch.float32
        assert scores.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_scores_stay_on_the_device_of_the_cache(make_state, make_any, name):
    # The meta device stands for an accelerator: mixing it with the CPU fails.
    state = make_state(300)
    parts = {key: value.to("meta") for key, value in vars(state).items() if isinstance(value, torch.Tensor)}
    assert make_any(name).score(_changed(state, **parts)).device.type == "meta"


@pytest.mark.parametrize("name", NAMES)
def test_scoring_leaves_no_trace(make_state, make_any, name):
    method, state = make_any(name), make_state(70)
    before = {key: value.clone() for key, value in vars(state).items() if isinstance(value, torch.Tensor)}
    first = method.score(state).clone()
    method.score(make_state(40, seed=9))
    assert torch.equal(method.score(state), first)
    assert all(torch.equal(getattr(state, key), value) for key, value in before.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.anything = 1


@pytest.mark.parametrize("name", NAMES)
def test_only_the_queries_asked_for_are_needed(make_state, make_any, name):
    method = make_any(name)
    wanted = 80 if method.num_queries is None else method.num_queries
    full = method.score(make_state(80))
    assert torch.equal(method.score(make_state(80, num_queries=wanted)), full)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
def test_one_layer_at_a_time_scores_the_same(make_state, make_any, name):
    """Layers are independent, but for the random method, whose one draw belongs to the whole cache."""
    method, state = make_any(name), make_state(300)
    whole = method.score(state)
    for layer in range(2):
        part = {
            key: getattr(state, key)[2 * layer : 2 * layer + 2] for key in ("keys", "values", "queries", "importance")
        }
        torch.testing.assert_close(
            method.score(type(state)(**{**vars(state), **part})), whole[2 * layer : 2 * layer + 2]
        )


def _compact(state: CacheState, kept: torch.Tensor) -> CacheState:
    """The cache after a compression in which every head kept the same tokens."""
    order = kept[0]
    return CacheState(
        keys=state.keys[:, order],
        values=state.values[:, order],
        queries=state.queries[:, :, order],
        positions=state.positions[:, order],
        num_kv_heads=state.num_kv_heads,
        scaling=state.scaling,
        seed=state.seed,
        importance=None if state.importance is None else state.importance[:, order],
    )


@pytest.mark.parametrize("always", [{}, {"num_sink_tokens": 0, "num_recent_tokens": 0}], ids=["always kept", "scores"])
def test_streaming_llm_keeps_its_sinks_at_the_second_compression(make_state, always):
    method, state = make_method("streaming_llm"), make_state(100)
    once = kept_positions(method.score(state), 60, **always)
    compacted = _compact(state, once)
    twice = kept_positions(method.score(compacted), 30, **always)
    expected = [0, 1, 2, 3, *range(74, 100)]
    for head in range(4):
        assert compacted.positions[0, twice[head]].tolist() == expected


@pytest.mark.parametrize("always", [{}, {"num_sink_tokens": 0, "num_recent_tokens": 0}], ids=["always kept", "scores"])
def test_tied_scores_keep_the_earliest_and_stay_in_order(always):
    once = kept_positions(torch.zeros(3, 4000), 400, **always)
    recent = always.get("num_recent_tokens", 16)
    assert once[0].tolist() == [*range(400 - recent), *range(4000 - recent, 4000)]
    assert torch.equal(once, once.sort(dim=-1).values)
    twice = kept_positions(torch.zeros(3, 400), 40, **always)
    assert once[0][twice[0]][:4].tolist() == [0, 1, 2, 3]


def test_repeated_compression_equals_one_for_methods_that_judge_tokens_alone(make_state):
    state = make_state(100, num_layers=1, num_kv_heads=1)
    for name in ("streaming_llm", "knorm", "oracle"):
        method = make_method(name)
        compacted = _compact(state, kept_positions(method.score(state), 60))
        twice = compacted.positions[0, kept_positions(method.score(compacted), 30)[0]]
        assert twice.tolist() == kept_positions(method.score(state), 30)[0].tolist(), name


@pytest.mark.parametrize("name", [name for name in NAMES if name != "full"])
def test_a_method_keeps_its_budget_and_what_every_budget_keeps(make_state, make_any, name):
    method, state = make_any(name), make_state(90)
    for budget in (20, 37, 90):
        kept = kept_by_method(method, state, method.score(state), budget)
        assert int((kept != NOT_KEPT).sum()) == budget * state.num_heads
        for row in kept.tolist():
            own = [token for token in row if token != NOT_KEPT]
            assert own == sorted(set(own)) and {*range(4), *range(74, 90)} <= set(own)


@pytest.mark.parametrize("shares", [[20, 30, 30, 30], [10, 30, 30, 30], [30, 30, 30]])
def test_a_method_that_shares_a_budget_wrongly_is_refused(unchecked, make_state, shares):
    class Greedy(StreamingLLM):
        def allocate(self, state, scores, budget):
            return torch.tensor(shares)

    state = make_state(90)
    with pytest.raises(InputError, match="budget"):
        kept_by_method(Greedy(), state, Greedy().score(state), 25)


def test_unknown_method_lists_the_names():
    with pytest.raises(InputError, match=r"'h3o' is unknown, expected one of kvp, random, .*, full, oracle"):
        make_method("h3o")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("snapkv", {"window": 3}, "unknown parameter window, expected window_tokens, kernel"),
        ("snapkv", {"kernel": 4}, "kernel is 4, expected an odd number"),
        ("snapkv", {"window_tokens": 0}, "window_tokens is 0, expected an integer of at least 1"),
        ("snapkv", {"window_tokens": 6.5}, "window_tokens is 6.5"),
        ("lagkv", {"lag_tokens": -1}, "lag_tokens is -1"),
        ("lagkv", {"num_sink_tokens": -1}, "num_sink_tokens is -1"),
        ("streaming_llm", {"num_sink_tokens": True}, "num_sink_tokens is True"),
        ("tova", {"window_tokens": 3}, "unknown parameter window_tokens, expected none"),
        ("kvp", {}, "parameter policy is missing"),
    ],
)
def test_wrong_parameters_are_one_clear_line(unchecked, name, parameters, message):
    with pytest.raises(InputError, match=message) as error:
        make_method(name, **parameters)
    assert "\n" not in str(error.value)


def test_a_policy_of_another_model_is_refused(make_state):
    class Other:
        def score(self, keys, values, positions):
            return torch.zeros(1, 2)

    with pytest.raises(InputError, match="trained for another model"):
        make_method("kvp", policy=Other()).score(make_state())


def test_a_learned_policy_records_no_gradient(make_state):
    class Agents(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def score(self, keys, values, positions):
            return keys @ self.weight

    scores = make_method("kvp", policy=Agents()).score(make_state())
    assert not scores.requires_grad


def _changed(state: CacheState, **fields: object) -> CacheState:
    return CacheState(**{**vars(state), **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": torch.zeros(4, 23, 4)}, "values has shape"),
        ({"positions": torch.arange(23)[None]}, "positions has shape"),
        ({"positions": torch.arange(24)}, "positions has shape"),
        ({"positions": torch.arange(24).expand(2, -1)}, "positions has shape"),
        ({"importance": torch.zeros(3, 24)}, "importance has shape"),
        ({"queries": torch.zeros(3, 3, 24, 4)}, "queries have shape"),
        ({"queries": torch.zeros(4, 3, 25, 4)}, "25 queries for 24 tokens"),
        ({"num_kv_heads": 3}, "4 heads do not divide"),
    ],
)
def test_a_cache_whose_parts_disagree_is_refused(unchecked, make_state, fields, message):
    with pytest.raises(InputError, match=message):
        _changed(make_state(), **fields)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), num_tokens=st.integers(20, 90), data=st.data())
def test_kept_sets_are_nested_in_the_budget(make_state, make_any, name, num_tokens, data):
    # The fixtures are plain functions, so sharing them between examples is harmless.
    scores = make_any(name).score(make_state(num_tokens, seed=data.draw(st.integers(0, 2**32))))
    small = data.draw(st.integers(20, num_tokens))
    large = data.draw(st.integers(small, num_tokens))
    for few, many in zip(kept_positions(scores, small).tolist(), kept_positions(scores, large).tolist(), strict=True):
        assert set(few) <= set(many)
