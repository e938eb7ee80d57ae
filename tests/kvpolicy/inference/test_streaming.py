"""Chunks and streams against a model that never compacts: every head of every token has a mask of what it may see."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvpolicy.inference.streaming as module
from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.rotary_proof import read_rotary
from kvpolicy.attention.session import attention_session
from kvpolicy.inference.decoding import decode_greedily
from kvpolicy.inference.loading import load_language_model
from kvpolicy.inference.streaming import (
    StreamedCaches,
    StreamedRow,
    check_recompression,
    token_losses,
)
from kvpolicy.methods.base import CacheState
from kvpolicy.methods.ranking import kept_positions
from kvpolicy.methods.registry import make_method, method_names, method_type
from kvpolicy.methods.streaming_llm import StreamingLLM
from kvpolicy.seeds import derive_seed
from tests.drawn_policy import draw_policy

TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}
CAN = tuple(name for name in method_names() if method_type(name).recompression_obstacle is None)
CANNOT = tuple(name for name in method_names() if name not in CAN)
# Short enough for these texts to be longer than what the methods would keep anyway.
PARAMETERS = {"snapkv": {"window_tokens": 24}, "lagkv": {"lag_tokens": 8}}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


def _method(model, name):
    trained = {
        "policy": draw_policy(model),
        "soft_tokens": SimpleNamespace(embeddings=torch.zeros(2, 64)),
    }
    fields = {field.name for field in dataclasses.fields(method_type(name))}
    given = {field: value for field, value in trained.items() if field in fields}
    return make_method(name, **given, **PARAMETERS.get(name, {}))


class _Masked:
    """Attends to the whole sequence under a mask of each KV head, and keeps all keys, values and queries."""

    def __init__(self, visible, num_kv_heads):
        self.num_positions = visible.shape[1]
        self.visible, self.num_kv_heads = visible, num_kv_heads
        self.keys, self.values, self.queries = {}, {}, {}

    def attend(self, layer, query, key, value, scaling):
        self.scaling = scaling
        outputs = []
        for head in range(self.num_kv_heads):
            index, group = layer * self.num_kv_heads + head, query.shape[1] // self.num_kv_heads
            own = query[0, head * group : (head + 1) * group]
            self.keys[index], self.values[index], self.queries[index] = key[0, head], value[0, head], own
            logits = (own @ key[0, head].T * scaling.factor).masked_fill(~self.visible[index], -torch.inf)
            outputs.append(logits.softmax(dim=-1) @ value[0, head])
        return torch.cat(outputs)[None]


def _reference(model, row, tokens, interval):
    """Logits of every token, and what each head holds after each eviction; nothing is ever compacted."""
    heads, num_tokens = model.spec.num_heads, len(tokens)
    visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril().repeat(heads, 1, 1)
    held, logits, history = torch.zeros(heads, 0, dtype=torch.long), [], []
    for start in range(0, num_tokens, interval):
        end = min(start + interval, num_tokens)
        visible[:, start:, :start] = False
        for head in range(heads):
            visible[head, start:, held[head]] = True
        session = _Masked(visible[:, :end, :end], model.spec.num_kv_heads)
        with attention_session(session):
            logits.append(model.logits(tokens[None, :end], torch.arange(end)[None], end)[0, start:])
        held = torch.cat([held, torch.arange(start, end).expand(heads, -1)], dim=1)
        if end - start < interval:
            break
        if held.shape[1] > row.budget:
            asked = max(interval, 128) if row.method.num_queries is None else row.method.num_queries
            state = CacheState(
                keys=torch.stack([session.keys[head][held[head]] for head in range(heads)]),
                values=torch.stack([session.values[head][held[head]] for head in range(heads)]),
                queries=torch.stack([session.queries[head] for head in range(heads)])[
                    :, :, max(0, end - min(asked, held.shape[1])) :
                ],
                positions=held,
                num_kv_heads=model.spec.num_kv_heads,
                scaling=session.scaling,
                seed=derive_seed(row.seed, len(history)),
                rotary=read_rotary(model, end),
            )
            held = held.gather(1, kept_positions(row.method.score(state), row.budget))
        history.append(held)
    return torch.cat(logits), history


def _stream(model, rows, tokens, interval, *, pieces=()):
    """Logits of every token of every row, and the positions of each row after each interval, checking the bounds."""
    caches = StreamedCaches(model, rows, interval_tokens=interval)
    most = max(row.budget for row in rows) + interval
    logits, history, start = [], [], 0
    for size in pieces or [interval] * (-(-len(tokens) // interval)):
        ids = tokens[start : start + size].expand(len(rows), -1)
        positions = torch.arange(start, start + ids.shape[1]).expand(len(rows), -1)
        logits.append(caches.run(model, ids, positions, num_logits=ids.shape[1]))
        start += ids.shape[1]
        assert caches.num_slots <= most
        history.append([caches.positions(row) for row in range(len(rows))])
    return torch.cat(logits, dim=1), history, caches


@given(
    name=st.sampled_from(CAN),
    num_tokens=st.integers(30, 120),
    interval=st.integers(1, 50),
    budget=st.integers(20, 70),
    seed=st.integers(0, 9),
)
@settings(
    deadline=None,
    max_examples=25,
    derandomize=True,  # of two scores that nearly tie, rounding would decide once in a while
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a plain function
)
def test_a_stream_equals_hiding_what_it_evicted(model, draw_tokens, name, num_tokens, interval, budget, seed):
    interval = max(interval, num_tokens // 12)
    row = StreamedRow(method=_method(model, name), budget=budget, seed=seed)
    tokens = draw_tokens(num_tokens, seed=seed)
    expected, held = _reference(model, row, tokens, interval)
    logits, history, _ = _stream(model, [row], tokens, interval)
    torch.testing.assert_close(logits[0], expected, **TOLERANCE)
    for step, positions in enumerate(held):
        assert torch.equal(history[step][0], positions)
        seen = (step + 1) * interval
        always = torch.tensor([*range(min(4, seen)), *range(max(0, seen - 16), seen)])
        assert all(torch.isin(always, head).all() for head in positions)


@pytest.mark.parametrize("family", ["llama_mha", "qwen3", "gemma"])
def test_a_stream_of_another_family_equals_hiding(tiny_model, draw_tokens, family):
    model, tokens = tiny_model(family), draw_tokens(100)
    for name in ("snapkv", "tova", "keydiff"):
        row = StreamedRow(method=_method(model, name), budget=32)
        expected, held = _reference(model, row, tokens, 20)
        logits, history, _ = _stream(model, [row], tokens, 20)
        torch.testing.assert_close(logits[0], expected, **TOLERANCE)
        assert all(torch.equal(found[0], positions) for found, positions in zip(history, held, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 500])
def test_chunks_change_nothing_when_the_budget_holds_everything(
    tiny_model, eager_network, draw_tokens, family, chunk_tokens
):
    model, tokens = tiny_model(family), draw_tokens(64)
    row = StreamedRow(method=StreamingLLM(), budget=64)
    with torch.no_grad():
        expected = eager_network(family)(input_ids=tokens[None], use_cache=False).logits
    torch.testing.assert_close(_stream(model, [row], tokens, chunk_tokens)[0], expected, **TOLERANCE)


@pytest.mark.slow
def test_chunks_of_the_embedded_model_are_exact(embedded_model_folder):
    model = load_language_model(embedded_model_folder, dtype="float32")
    text = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun until the evening comes. " * 12
    tokens = torch.tensor(model.tokenizer(text)["input_ids"])
    row = StreamedRow(method=StreamingLLM(), budget=len(tokens))
    whole = prefill(model, tokens, num_queries=0, num_logits=len(tokens)).logits
    difference = (_stream(model, [row], tokens, 100)[0][0] - whole).abs().max() / whole.std()
    assert float(difference) < 1e-4


def test_rows_do_not_depend_on_each_other_or_on_their_order(model, draw_tokens):
    tokens = draw_tokens(110)
    rows = [StreamedRow(method=_method(model, name), budget=25 + 9 * index) for index, name in enumerate(CAN)]
    together, history, _ = _stream(model, rows, tokens, 30)
    turned, turned_history, _ = _stream(model, rows[::-1], tokens, 30)
    torch.testing.assert_close(turned.flip(0), together, **TOLERANCE)
    for index, row in enumerate(rows):
        alone, own, _ = _stream(model, [row], tokens, 30)
        torch.testing.assert_close(together[index], alone[0], **TOLERANCE)
        for step in range(len(history)):
            assert torch.equal(history[step][index], own[step][0])
            assert torch.equal(turned_history[step][-1 - index], own[step][0])


@given(pieces=st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_does_not_matter_how_a_stream_is_fed(model, draw_tokens, pieces):
    row = StreamedRow(method=_method(model, "snapkv"), budget=28)
    tokens = draw_tokens(sum(pieces))
    logits, history, caches = _stream(model, [row], tokens, 16, pieces=pieces)
    expected, whole, _ = _stream(model, [row], tokens, 16)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert torch.equal(history[-1][0], whole[-1][0])
    assert caches.num_evictions == sum(pieces) // 16
    assert caches.num_seen_tokens == sum(pieces)


def test_sinks_and_positions_survive_many_evictions(model, draw_tokens):
    rows = [StreamedRow(method=StreamingLLM(), budget=budget) for budget in (20, 33, 60)]
    _, history, caches = _stream(model, rows, draw_tokens(500), 10)
    assert caches.num_evictions == 50
    for step, found in enumerate(history):
        seen = (step + 1) * 10
        for row, positions in zip(rows, found, strict=True):
            kept = list(range(seen))
            if seen > row.budget:
                kept = [*range(4), *range(seen - row.budget + 4, seen)]
            assert positions.tolist() == [kept] * model.spec.num_heads


@pytest.mark.parametrize("name", method_names())
def test_every_method_runs_in_chunks_or_says_why_not(model, draw_tokens, fails_in_one_line, name):
    method = _method(model, name)
    row = StreamedRow(method=method, budget=40)
    if name in CANNOT:
        message = fails_in_one_line(StreamedCaches, model, [row], interval_tokens=32)
        assert f"method {name} " in message and method.recompression_obstacle in message
        return
    check_recompression(method)
    _, history, caches = _stream(model, [row], draw_tokens(150), 32)
    assert history[-2][0].shape == (model.spec.num_heads, 40)
    assert caches.num_slots == 72


@pytest.mark.parametrize("name", CAN)
def test_an_answer_while_evicting_is_that_of_the_masked_model(model, draw_tokens, name):
    tokens, interval = draw_tokens(48), 16
    row = StreamedRow(method=_method(model, name), budget=24)
    caches = StreamedCaches(model, [row], interval_tokens=interval)
    logits = caches.run(model, tokens[None], torch.arange(48)[None], num_logits=1)
    answer = decode_greedily(model, caches, logits[:, -1].argmax(-1), first_position=48, max_new_tokens=60)[0]
    assert caches.num_slots == 24 + interval
    whole = torch.cat([tokens, torch.tensor(answer)])
    expected = _reference(model, row, whole, interval)[0].argmax(dim=-1)[47:]
    assert answer == expected[: len(answer)].tolist()
    assert len(answer) == 60 or expected[len(answer)] == model.tokenizer.eos_token_id


def test_rows_that_are_done_leave_a_stream(model, draw_tokens):
    rows = [StreamedRow(method=_method(model, name), budget=24) for name in ("knorm", "snapkv", "keydiff")]
    tokens = draw_tokens(96)
    expected, history, _ = _stream(model, rows, tokens, 16)
    caches = StreamedCaches(model, rows, interval_tokens=16)
    caches.run(model, tokens[:50].expand(3, -1), torch.arange(50).expand(3, -1), num_logits=1)
    caches.keep_rows(torch.tensor([2, 0]))
    logits = caches.run(model, tokens[50:].expand(2, -1), torch.arange(50, 96).expand(2, -1), num_logits=46)
    torch.testing.assert_close(logits, expected[[2, 0], 50:], **TOLERANCE)
    assert torch.equal(caches.positions(0), history[-1][2]) and torch.equal(caches.positions(1), history[-1][0])


def test_another_interval_begins_with_an_eviction_and_as_much_room(model, draw_tokens):
    caches = StreamedCaches(model, [StreamedRow(method=StreamingLLM(), budget=30)], interval_tokens=40)
    tokens = draw_tokens(60)
    caches.run(model, tokens[None], torch.arange(60)[None], num_logits=1)
    assert (caches.num_held(0), caches.num_slots) == (50, 70)
    caches.evict_every(7)
    assert (caches.num_held(0), caches.num_slots) == (30, 37)


def test_losses_are_transformers_own_when_everything_is_held(model, eager_network, draw_tokens, monkeypatch):
    monkeypatch.setattr(module, "_LOGITS_TOKENS", 13)
    tokens = draw_tokens(70)
    rows = [StreamedRow(method=StreamingLLM(), budget=budget) for budget in (70, 25)]
    losses = token_losses(model, StreamedCaches(model, rows, interval_tokens=10), tokens)
    with torch.no_grad():
        expected = eager_network("llama")(input_ids=tokens[None], labels=tokens[None], use_cache=False).loss
    assert losses.shape == (2, 69)
    torch.testing.assert_close(losses[0].mean(), expected, atol=1e-4, rtol=1e-5)
    logits = _reference(model, rows[1], tokens, 10)[0][:-1]
    of_less = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    torch.testing.assert_close(losses[1], of_less, atol=1e-3, rtol=1e-4)
    assert abs(losses[1].mean() - expected) > 1e-3


def test_a_stream_that_is_not_asked_for_logits_gives_none_and_is_the_same(model, draw_tokens):
    tokens, positions = draw_tokens(60)[None], torch.arange(60)[None]
    caches, others = (
        StreamedCaches(model, [StreamedRow(method=_method(model, "snapkv"), budget=25)], interval_tokens=20)
        for _ in range(2)
    )
    whole = caches.run(model, tokens, positions, num_logits=60)
    assert others.run(model, tokens[:, :50], positions[:, :50], num_logits=0).shape == (1, 0, whole.shape[2])
    torch.testing.assert_close(others.run(model, tokens[:, 50:], positions[:, 50:], num_logits=10), whole[:, 50:])
    assert torch.equal(caches.positions(0), others.positions(0))


def test_heads_with_budgets_of_their_own_are_refused(model, draw_tokens, fails_in_one_line):
    class Uneven(StreamingLLM):
        def allocate(self, state, scores, budget):
            shares = torch.full((state.num_heads,), budget)
            shares[0] += 2
            shares[1] -= 2
            return shares

    row = StreamedRow(method=Uneven(), budget=30)
    message = fails_in_one_line(_stream, model, [row], draw_tokens(60), 20)
    assert "method streaming_llm: heads that keep different numbers" in message


@pytest.mark.parametrize(
    ("changes", "interval", "expected"),
    [
        ({"budget": 19}, 8, "budget: 19 tokens"),
        ({"budget": 513}, 8, "to 512"),
        ({}, 0, "interval of 0 tokens"),
        (None, 8, "no rows"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(model, fails_in_one_line, changes, interval, expected):
    row = StreamedRow(method=StreamingLLM(), budget=30)
    rows = [] if changes is None else [dataclasses.replace(row, **changes)]
    assert expected in fails_in_one_line(StreamedCaches, model, rows, interval_tokens=interval)


def test_gaps_and_short_texts_are_refused(model, draw_tokens, fails_in_one_line):
    caches = StreamedCaches(model, [StreamedRow(method=StreamingLLM(), budget=30)], interval_tokens=8)
    message = fails_in_one_line(caches.run, model, draw_tokens(1, 3), torch.tensor([[1, 2, 3]]), num_logits=1)
    assert "positions from 1 to 3, expected 0 to 2" in message
    assert "text of 1 tokens" in fails_in_one_line(token_losses, model, caches, draw_tokens(1))
    assert "512 positions" in fails_in_one_line(token_losses, model, caches, draw_tokens(514))
