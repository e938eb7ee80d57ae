"""Evaluation of one example: anchored at the full cache, complete, from one prefill, right against slow readings."""

import itertools
from collections import Counter

import pytest
import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.benchmarks.ruler import generate
from kvpolicy.benchmarks.scoring import score_answer
from kvpolicy.evaluation import Contender, answers, evaluate_example
from kvpolicy.inference import batching
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.methods.base import CacheState
from kvpolicy.methods.knorm import KNorm
from kvpolicy.methods.ranking import kept_positions
from kvpolicy.methods.registry import make_method, method_names
from kvpolicy.text.encoded_sample import count_prompt_tokens, encode
from kvpolicy.text.sample import Sample

BUDGETS = (20, 33, 48)
SETTINGS = ("query_agnostic", "query_aware")


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def network(eager_network):
    return eager_network("llama")


def _sample(**changes):
    fields = {
        "sample_id": "ruler/niah_single_1/test/0/0/200",
        "benchmark": "ruler",
        "task": "niah_single_1",
        "split": "test",
        "context": "A special magic number is hidden in this text: 4821. Keep it well.",
        "question": " What is it?",
        "answer_prefix": " The number is",
        "answer": " 4821.",
        "references": ("4821",),
        "max_new_tokens": 24,
    }
    return Sample(**(fields | changes))


def _example(model, **changes):
    return encode(_sample(**changes), model.tokenizer)


def _greedy_text(network, model, example):
    ids = torch.tensor([example.context_ids + example.question_ids])
    with torch.no_grad():
        out = network.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=example.sample.max_new_tokens
        )
    new = out[0, ids.shape[1] :].tolist()
    end = model.tokenizer.eos_token_id
    return model.tokenizer.decode(new[: new.index(end)] if end in new else new)


def _table(result):
    return {
        (score.setting, score.method, score.seed, score.budget, score.metric): score.value for score in result.scores
    }


def test_the_full_cache_is_the_model_itself(model, network, make_contenders):
    example = _example(model)
    # What the model says decides the references: a part it says, a part it does not.
    text = _greedy_text(network, model, example)
    example = _example(model, references=(text[4:9], "never said", text[:3], "nor this"))
    expected = score_answer(example.sample, text)
    assert expected == 0.5
    table = _table(evaluate_example(model, example, make_contenders(model, ["full"]), BUDGETS))
    for setting, budget in itertools.product(SETTINGS, BUDGETS):
        assert table[setting, "full", 0, budget, "kl"] < 1e-6
        assert table[setting, "full", 0, budget, "kl_answer"] < 1e-6
        assert table[setting, "full", 0, budget, "string_match"] == expected


@pytest.mark.parametrize("setting", SETTINGS)
def test_keeping_the_whole_context_equals_full(model, network, setting, make_contenders):
    text = _greedy_text(network, model, _example(model))
    example = _example(model, references=(text[2:8], "never said"))
    whole = len(example.context_ids) + (len(example.question_ids) if setting == "query_aware" else 0)
    names = [name for name in method_names() if name != "full"]
    table = _table(evaluate_example(model, example, make_contenders(model, names), [whole], settings=[setting]))
    assert {key[1] for key in table} == set(names)
    for key, value in table.items():
        assert value == (0.5 if key[-1] == "string_match" else pytest.approx(0.0, abs=1e-6)), key


def test_there_is_a_score_for_everything_and_only_once(model, make_contenders):
    contenders = [*make_contenders(model, method_names()), Contender(method=make_method("random"), seed=1)]
    result = evaluate_example(model, _example(model), contenders, BUDGETS)
    counted = Counter((s.setting, s.method, s.seed, s.budget, s.metric) for s in result.scores)
    expected = {
        (setting, contender.method.name, contender.seed, budget, metric)
        for setting in SETTINGS
        for contender in contenders
        for budget in BUDGETS
        for metric in ("kl", "kl_answer", "string_match")
    }
    assert set(counted) == expected
    assert set(counted.values()) == {1}
    assert all(torch.tensor(score.value).isfinite() and score.value >= 0 for score in result.scores)
    costs = {(entry.setting, entry.method, entry.seed): entry.costs for entry in result.head_costs}
    assert set(costs) == {(s, c.method.name, c.seed) for s in SETTINGS for c in contenders if c.method.name != "full"}
    for (_, method, _), values in costs.items():
        assert values.shape == (model.spec.num_heads,)
        assert (values >= 1 - 1e-5).all()
        if method == "oracle":
            torch.testing.assert_close(values, torch.ones(model.spec.num_heads))


def test_without_generation_the_other_scores_are_the_same(model, make_contenders):
    example, contenders = _example(model), make_contenders(model, ["full", "knorm", "snapkv"])
    quick = _table(evaluate_example(model, example, contenders, BUDGETS, generate=False))
    whole = _table(evaluate_example(model, example, contenders, BUDGETS))
    assert quick == {key: pytest.approx(value, abs=1e-6) for key, value in whole.items() if key[-1] != "string_match"}


def test_one_prefill_serves_everything(model, make_contenders):
    example = _example(model)
    starts = []

    def note(module, args, kwargs):
        starts.append((int(kwargs["position_ids"].min()), kwargs["input_ids"].shape[1]))

    hook = model.network.register_forward_pre_hook(note, with_kwargs=True)
    try:
        evaluate_example(model, example, make_contenders(model, method_names()), BUDGETS)
    finally:
        hook.remove()
    num_tokens = len(example.context_ids) + len(example.question_ids) + len(example.answer_ids)
    # The few tokens that prove how queries turn are no prefill of the example.
    assert [start for start in starts if start[0] == 0 and start[1] > 8] == [(0, num_tokens)]
    assert starts[0] == (0, num_tokens)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["knorm", "h2o", "oracle", "snapkv"])
def test_fidelity_against_a_slow_computation(model, network, setting, name, make_contenders):
    # Scores from the method's own state made anew, a cache of one row, one token at a time, KL by log-softmax.
    example = _example(model)
    n = len(example.context_ids) + (len(example.question_ids) if setting == "query_aware" else 0)
    ids = torch.tensor(example.context_ids + example.question_ids + example.answer_ids)
    with torch.no_grad():
        out = network(input_ids=ids[None], output_attentions=True, use_cache=False)
    whole = prefill(model, ids, num_queries=len(ids))
    group = model.spec.group_size
    attention = torch.cat([layer[0].unflatten(0, (-1, group)).amax(dim=1) for layer in out.attentions])
    state = CacheState(
        keys=whole.keys[:, :n],
        values=whole.values[:, :n],
        queries=whole.queries[:, :, :n],
        positions=torch.arange(n)[None],
        num_kv_heads=model.spec.num_kv_heads,
        scaling=whole.scaling,
        importance=attention[:, n:, :n].sum(dim=1),
    )
    kept = kept_positions(make_method(name).score(state), 33)
    cache = CompactedCache(
        state.keys, state.values, [kept], num_kv_heads=model.spec.num_kv_heads, num_new_tokens=len(ids) - n
    )
    divergences = []
    for position in range(n, len(ids) - 1):
        logits = cache.run(model, ids[None, position : position + 1], torch.tensor([[position]]), num_logits=1)[0, 0]
        p, q = out.logits[0, position].double().log_softmax(0), logits.double().log_softmax(0)
        divergences.append((p.exp() * (p - q)).sum().item())
    first_of_answer = max(0, len(example.question_ids) - 1) if setting == "query_agnostic" else 0
    table = _table(
        evaluate_example(model, example, make_contenders(model, [name]), [33], settings=[setting], generate=False)
    )
    expected = sum(divergences) / len(divergences)
    of_answer = divergences[first_of_answer:]
    assert expected > 1e-3
    assert len(of_answer) == len(example.answer_ids) - (setting == "query_aware")
    assert table[setting, name, 0, 33, "kl"] == pytest.approx(expected, rel=1e-2)
    assert table[setting, name, 0, 33, "kl_answer"] == pytest.approx(sum(of_answer) / len(of_answer), rel=1e-2)


@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_are_those_of_the_compacted_cache(model, setting, monkeypatch, make_contenders):
    # Decoded anew from a cache of one row, with a pass a token.
    example = _example(model, references=("never said",))
    n = len(example.context_ids) + (len(example.question_ids) if setting == "query_aware" else 0)
    ids = torch.tensor(example.context_ids + example.question_ids)
    whole = prefill(model, ids, num_queries=0)
    scores = (whole.values[:, :n] * whole.keys[:, :n]).sum(dim=-1)
    cache = CompactedCache(
        whole.keys[:, :n],
        whole.values[:, :n],
        [kept_positions(scores, 24)],
        num_kv_heads=model.spec.num_kv_heads,
        num_new_tokens=len(ids) - n + 24,
    )
    logits = whole.logits[-1]
    for position in range(n, len(ids)):
        logits = cache.run(model, ids[None, position : position + 1], torch.tensor([[position]]), num_logits=1)[0, 0]
    tokens = []
    for step in range(24):
        tokens.append(int(logits.argmax()))
        if tokens[-1] == model.tokenizer.eos_token_id:
            tokens.pop()
            break
        position = torch.tensor([[len(ids) + step]])
        logits = cache.run(model, torch.tensor([[tokens[-1]]]), position, num_logits=1)[0, 0]
    said = []
    monkeypatch.setattr(answers, "score_answer", lambda sample, text: said.append(text) or 0.0)
    monkeypatch.setattr(KNorm, "score", lambda method, state: scores)  # ties in norms would hang on rounding
    evaluate_example(model, example, make_contenders(model, ["full", "knorm"]), [24], settings=[setting])
    assert model.tokenizer.decode(tokens) in said[-2:]  # the last two are the answers of the two rows


def test_small_batches_score_as_large_ones(model, monkeypatch, make_contenders):
    example, contenders = _example(model), make_contenders(model, ["full", "knorm", "tova", "random"])
    large = _table(evaluate_example(model, example, contenders, BUDGETS))
    monkeypatch.setattr(batching, "MAX_ENTRIES", 100)
    small = _table(evaluate_example(model, example, contenders, BUDGETS))
    monkeypatch.setattr(batching, "MAX_LOGITS", 1)
    single = _table(evaluate_example(model, example, contenders, BUDGETS))
    for other in (small, single):
        assert other == {key: pytest.approx(value, abs=2e-5) for key, value in large.items()}


def test_random_differs_by_seed_and_by_example_and_repeats(model):
    example = _example(model)
    contenders = [Contender(method=make_method("random"), seed=seed) for seed in (0, 1)]

    def costs(**options):
        result = evaluate_example(model, example, contenders, [33], generate=False, settings=SETTINGS[:1], **options)
        return [entry.costs for entry in result.head_costs]

    (first, second), again, elsewhere = costs(), costs(), costs(sample_seed=5)
    assert not torch.equal(first, second)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    assert not torch.equal(first, elsewhere[0])


@pytest.mark.parametrize(
    ("budget", "setting"), [(19, "query_agnostic"), (10_000, "query_agnostic"), (19, "query_aware")]
)
def test_budgets_out_of_range_are_one_line(model, fails_in_one_line, budget, setting, make_contenders):
    message = fails_in_one_line(
        evaluate_example, model, _example(model), make_contenders(model, ["knorm"]), [33, budget], settings=[setting]
    )
    assert f"{budget} tokens" in message


def test_an_unknown_setting_is_one_line(model, fails_in_one_line, make_contenders):
    message = fails_in_one_line(
        evaluate_example, model, _example(model), make_contenders(model, ["knorm"]), [33], settings=["question_aware"]
    )
    assert "'question_aware'" in message and "query_agnostic" in message


def test_an_example_beyond_the_models_positions_is_one_line(tiny_model, fails_in_one_line, make_contenders):
    model = tiny_model("llama", max_position_embeddings=64)
    message = fails_in_one_line(evaluate_example, model, _example(model), make_contenders(model, ["knorm"]), [33])
    assert "64 positions" in message


@pytest.mark.parametrize("family", ["llama_mha", "qwen2", "qwen3", "phi3", "mistral", "gemma"])
def test_every_family_is_evaluated(tiny_model, family, make_contenders):
    model = tiny_model(family)
    table = _table(evaluate_example(model, _example(model), make_contenders(model, method_names()), BUDGETS))
    for setting in SETTINGS:
        assert all(table[setting, "full", 0, budget, "kl"] < 1e-5 for budget in BUDGETS)
        assert all(table[setting, name, 0, 33, "kl"] > 1e-4 for name in method_names() if name != "full")
        # At the always-kept tokens alone there is nothing to choose.
        assert table[setting, "oracle", 0, 20, "kl"] == pytest.approx(table[setting, "random", 0, 20, "kl"], abs=1e-5)


def test_the_embedded_model_finds_a_needle_that_random_eviction_loses(embedded_model, make_contenders):
    sample = generate(
        "niah_single_1",
        split="test",
        index=0,
        seed=0,
        length_tokens=512,
        count_tokens=lambda sample: count_prompt_tokens(sample, embedded_model.tokenizer),
    )
    example = encode(sample, embedded_model.tokenizer)
    contenders = make_contenders(embedded_model, ["full", "oracle", "random"])
    table = _table(evaluate_example(embedded_model, example, contenders, [64], settings=SETTINGS[:1]))
    assert table["query_agnostic", "full", 0, 64, "string_match"] == 1.0
    assert table["query_agnostic", "full", 0, 64, "kl"] < 0.02  # bfloat16: other shapes round otherwise
    assert table["query_agnostic", "oracle", 0, 64, "kl"] < 0.5 * table["query_agnostic", "random", 0, 64, "kl"]
    assert table["query_agnostic", "random", 0, 64, "string_match"] == 0.0


def test_chunks_compress_early_and_leave_bounds_as_they_are(model, make_contenders):
    example = _example(model)
    in_chunks = {"knorm", "tova"}  # one that needs no queries, and one that does
    contenders = make_contenders(model, ["full", "oracle", *in_chunks, "h2o"])
    once = _table(evaluate_example(model, example, contenders, BUDGETS))
    chunked = _table(evaluate_example(model, example, contenders, BUDGETS, chunk_tokens=16))
    assert chunked.keys() == once.keys()
    for key, value in once.items():
        if key[1] in in_chunks and key[-1] == "kl":
            assert chunked[key] != pytest.approx(value, rel=1e-3)  # what a small cache saw is another context
        elif key[1] not in in_chunks:  # a method that cannot rank again is compressed once
            assert chunked[key] == pytest.approx(value, abs=2e-5)


def test_one_chunk_is_no_chunk(model, make_contenders):
    example, contenders = _example(model), make_contenders(model, ["full", "knorm", "snapkv"])
    num_tokens = len(example.context_ids)
    once = _table(evaluate_example(model, example, contenders, BUDGETS, settings=SETTINGS[:1]))
    one = _table(evaluate_example(model, example, contenders, BUDGETS, settings=SETTINGS[:1], chunk_tokens=num_tokens))
    assert one == {key: pytest.approx(value, abs=2e-5) for key, value in once.items()}
