"""What holds for every registered method, and the traps of selection that methods fall into together."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpolicy.attention.probe import ProbeStates
from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, kept_by_method
from kvpolicy.methods.ranking import NOT_KEPT, kept_positions
from kvpolicy.methods.registry import make_method, method_names, method_type
from kvpolicy.methods.streaming_llm import StreamingLLM

NAMES = method_names()


def test_names_are_in_the_order_of_tables():
    learned = ("kvp", "kvp_heads", "judgeq")
    by_cache = ("random", "streaming_llm", "knorm", "keydiff", "lagkv", "expected_attention")
    by_attention = ("snapkv", "pyramidkv", "adakv", "tova", "h2o")
    assert (*learned, *by_cache, *by_attention, "full", "oracle") == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_method_describes_itself(name):
    method = method_type(name)
    assert method.name == name
    assert "\n" not in method.description
    assert method.reference == "none" or method.reference.startswith("arXiv ")
    assert dataclasses.is_dataclass(method)
    assert method.trained in {"", "policy_set", "soft_tokens"}
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
    elsewhere = _changed(state, **{key: _moved(value, "meta") for key, value in vars(state).items()})
    assert make_any(name).score(elsewhere).device.type == "meta"


@pytest.mark.parametrize("name", NAMES)
def test_scoring_leaves_no_trace(make_state, make_any, name):
    method, state = make_any(name), make_state(90)
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
        here = slice(2 * layer, 2 * layer + 2)
        part = {key: getattr(state, key)[here] for key in ("keys", "values", "queries", "importance")}
        part["probe"] = ProbeStates(queries=state.probe.queries[here], keys=state.probe.keys[here])
        torch.testing.assert_close(method.score(type(state)(**{**vars(state), **part})), whole[here])


def _moved(value: object, device: str) -> object:
    if dataclasses.is_dataclass(value):
        return type(value)(**{key: _moved(part, device) for key, part in vars(value).items()})
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_samples_makes_no_difference(make_state, make_any, name):
    method, states = make_any(name), [make_state(num_tokens, seed=num_tokens) for num_tokens in (90, 64, 120)]
    for order in itertools.permutations(range(3)):
        scores = {index: method.score(states[index]) for index in order}
        for index, state in enumerate(states):
            assert torch.equal(scores[index], make_any(name).score(state))


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
        rotary=state.rotary,
        probe=state.probe,
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


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_that_was_compacted_by_head_is_ranked_or_the_obstacle_is_told(make_state, make_any, name):
    """Positions differ by head, and the queries are those of the last chunk."""
    method, state = make_any(name), make_state(150, num_queries=80)
    kept = kept_positions(torch.rand(4, 150, generator=torch.Generator().manual_seed(0)), 100)
    entries = kept[..., None].expand(-1, -1, 4)
    compacted = CacheState(
        keys=state.keys.gather(1, entries),
        values=state.values.gather(1, entries),
        queries=state.queries,
        positions=kept,
        num_kv_heads=2,
        scaling=state.scaling,
        rotary=state.rotary,
    )
    if method.recompression_obstacle is None:
        scores = method.score(compacted)
        assert scores.shape == (4, 100)
        assert scores.isfinite().all()
        assert kept_by_method(method, compacted, scores, 50).shape == (4, 50)
    else:
        assert "\n" not in method.recompression_obstacle


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_tokens=st.integers(20, 200), data=st.data())
def test_a_method_keeps_its_budget_and_what_every_budget_keeps(make_state, make_any, name, num_tokens, data):
    # The fixtures are plain functions, so sharing them between examples is harmless.
    method, state = make_any(name), make_state(num_tokens, num_layers=3, seed=data.draw(st.integers(0, 2**32)))
    scores = method.score(state)
    small = data.draw(st.integers(20, num_tokens))
    large = data.draw(st.integers(small, num_tokens))
    kept = {budget: kept_by_method(method, state, scores, budget).tolist() for budget in (small, large)}
    for budget, heads in kept.items():
        assert sum(token != NOT_KEPT for head in heads for token in head) == budget * 6
        for head in heads:
            own = [token for token in head if token != NOT_KEPT]
            assert own == sorted(set(own))
            assert {*range(4), *range(num_tokens - 16, num_tokens)} <= set(head)
    for few, many in zip(kept[small], kept[large], strict=True):
        assert set(few) - {NOT_KEPT} <= set(many)


@pytest.mark.parametrize("shares", [[20, 30, 30, 30], [10, 30, 30, 30], [30, 30, 30]])
def test_a_method_that_shares_a_budget_wrongly_is_refused(unchecked, make_state, shares):
    class Greedy(StreamingLLM):
        def allocate(self, state, scores, budget):
            return torch.tensor(shares)

    state = make_state(90)
    with pytest.raises(InputError, match="budget"):
        kept_by_method(Greedy(), state, Greedy().score(state), 25)


def test_unknown_method_lists_the_names():
    with pytest.raises(InputError, match=r"'h3o' is unknown, expected one of kvp, kvp_heads, .*, full, oracle"):
        make_method("h3o")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("snapkv", {"window": 3}, "window is unknown, expected window_tokens, kernel"),
        ("snapkv", {"kernel": 4}, "kernel is 4, expected an odd number"),
        ("snapkv", {"window_tokens": 0}, "window_tokens is 0, expected at least 1"),
        ("snapkv", {"window_tokens": 6.5}, "window_tokens is 6.5"),
        ("lagkv", {"lag_tokens": -1}, "lag_tokens is -1"),
        ("lagkv", {"num_sink_tokens": -1}, "num_sink_tokens is -1"),
        ("streaming_llm", {"num_sink_tokens": True}, "num_sink_tokens is True"),
        ("tova", {"window_tokens": 3}, "window_tokens is unknown, expected none"),
        ("kvp", {}, "policy is missing"),
        ("kvp_heads", {"policy": None, "safeguard": 1.5}, "safeguard is 1.5, expected a number from 0 to 1"),
        ("kvp_heads", {"policy": None, "pool": "head"}, "pool is 'head', expected one of layer, model"),
        ("judgeq", {}, "soft_tokens is missing"),
        ("pyramidkv", {"beta": 0}, "beta is 0, expected at least 1"),
        ("adakv", {"safeguard": True}, "safeguard is True"),
        ("expected_attention", {"num_future_positions": 0}, "num_future_positions is 0"),
        ("expected_attention", {"epsilon": -0.1}, "epsilon is -0.1, expected at least 0"),
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
        ({"values": torch.zeros(4, 23, 4)}, "values have shape"),
        ({"positions": torch.arange(23)[None]}, "positions have shape"),
        ({"positions": torch.arange(24)}, "positions have shape"),
        ({"positions": torch.arange(24).expand(2, -1)}, "positions have shape"),
        ({"importance": torch.zeros(3, 24)}, "importance has shape"),
        ({"queries": torch.zeros(3, 3, 24, 4)}, "queries have shape"),
        ({"queries": torch.zeros(4, 3, 25, 4)}, "25 queries for 24 tokens"),
        ({"num_kv_heads": 3}, "4 heads do not divide"),
        (
            {"probe": ProbeStates(queries=torch.zeros(4, 2, 5, 4), keys=torch.zeros(4, 5, 4))},
            "queries of the probe have shape",
        ),
    ],
)
def test_a_cache_whose_parts_disagree_is_refused(unchecked, make_state, fields, message):
    with pytest.raises(InputError, match=message):
        _changed(make_state(), **fields)
