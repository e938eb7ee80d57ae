"""Training soft tokens: what they are to attend as, the loss, and that it falls for a reason."""

import dataclasses

import pytest
import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.probe import run_probe
from kvpolicy.methods.base import CacheState
from kvpolicy.methods.registry import make_method
from kvpolicy.names import SETTINGS
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.sample import Sample
from kvpolicy.training.soft_token_training import (
    SoftTokenConfig,
    attention_loss,
    greedy_response,
    make_lesson,
    train_soft_tokens,
)

CONFIG = SoftTokenConfig(num_tokens=4, num_steps=30, response="reference")


def _example(draw_tokens, *, context=40, question=6, answer=5, seed=0):
    tokens = draw_tokens(context + question + answer, seed=seed).tolist()
    sample = Sample(
        sample_id=f"sample-{seed}",
        benchmark="ruler",
        task="niah_single_1",
        split="train",
        context="context",
        question="question",
        answer_prefix="",
        answer="answer",
        references=("answer",),
        max_new_tokens=7,
    )
    return EncodedSample(
        sample=sample,
        context_ids=tuple(tokens[:context]),
        question_ids=tuple(tokens[context : context + question]),
        answer_ids=tuple(tokens[context + question :]),
    )


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


def _eager_attention(network, model, tokens, num_context):
    """Mean attention over the context of what follows it, in every KV head."""
    with torch.no_grad():
        layers = network(input_ids=tokens[None], output_attentions=True, use_cache=False).attentions
    weights = torch.cat([layer[0, :, num_context:, :num_context] for layer in layers])
    return weights.unflatten(0, (model.spec.num_heads, -1)).mean(dim=(1, 2))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_lesson_is_the_mean_attention_of_the_reference(model, eager_network, draw_tokens, setting):
    example = _example(draw_tokens)
    lesson = make_lesson(model, example, setting, CONFIG)
    num_context = {"query_agnostic": 40, "query_aware": 46}[setting]
    expected = _eager_attention(eager_network("llama"), model, draw_tokens(51), num_context)
    torch.testing.assert_close(lesson.attention, expected, atol=1e-5, rtol=1e-4)
    context = prefill(model, draw_tokens(51)[:num_context], num_queries=0)
    torch.testing.assert_close(lesson.keys, context.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lesson.values, context.values, atol=1e-4, rtol=1e-4)


def test_a_greedy_lesson_is_of_what_the_model_itself_says(model, eager_network, draw_tokens):
    example, prompt = _example(draw_tokens), draw_tokens(51)[:46]
    config = dataclasses.replace(CONFIG, response="greedy", max_response_tokens=6)
    with torch.no_grad():
        told = eager_network("llama").generate(
            prompt[None], attention_mask=torch.ones(1, 46), do_sample=False, max_new_tokens=6
        )[0]
    ends = (told[46:] == model.tokenizer.eos_token_id).nonzero().flatten().tolist()
    told = told[: 46 + max(1, ends[0])] if ends else told
    assert greedy_response(model, prompt, max_new_tokens=6) == told[46:].tolist()
    lesson = make_lesson(model, example, "query_agnostic", config)
    expected = _eager_attention(eager_network("llama"), model, told, 40)
    torch.testing.assert_close(lesson.attention, expected, atol=1e-5, rtol=1e-4)


def test_the_loss_is_the_squared_error_of_mean_attention(model, eager_network, draw_tokens):
    """Soft tokens that are the embeddings of tokens attend as those tokens do."""
    example = _example(draw_tokens)
    lesson = make_lesson(model, example, "query_agnostic", CONFIG)
    others = draw_tokens(3, seed=5)
    embeddings = model.network.get_input_embeddings()(others)
    tokens = torch.cat((draw_tokens(51)[:40], others))
    theirs = _eager_attention(eager_network("llama"), model, tokens, 40)
    expected = (theirs - lesson.attention).square().sum(dim=1).mean()
    torch.testing.assert_close(attention_loss(model, lesson, embeddings), expected, atol=1e-6, rtol=1e-3)
    response = model.network.get_input_embeddings()(draw_tokens(51)[40:])
    assert attention_loss(model, lesson, response).item() < 1e-8


def test_training_lowers_the_loss_and_repeats_with_its_seed(model, draw_tokens):
    lessons = [make_lesson(model, _example(draw_tokens, seed=seed), "query_agnostic", CONFIG) for seed in (1, 2)]
    losses = []
    trained = [
        train_soft_tokens(
            model, lessons, CONFIG, seed=seed, model_digest="d", on_step=lambda step, loss: losses.append(loss)
        )
        for seed in (0, 0, 1)
    ]
    assert torch.equal(trained[0].embeddings, trained[1].embeddings)
    assert losses[:30] == losses[30:60] != losses[60:]
    assert not torch.equal(trained[0].embeddings, trained[2].embeddings)
    assert sum(losses[25:30]) < 0.7 * sum(losses[:5])
    assert trained[0].embeddings.shape == (4, 64) and not trained[0].embeddings.requires_grad
    assert (trained[0].spec, trained[0].model_digest) == (model.spec, "d")
    record = trained[0].training
    assert (record["seed"], record["num_lessons"], record["first_loss"]) == (0, 2, losses[0])
    assert record["last_loss"] == pytest.approx(sum(losses[28:30]) / 2)


def test_trained_soft_tokens_rank_as_the_response_attends(model, draw_tokens):
    """On the context that they were trained on they find more of the response's mass than a draw of tokens does."""
    lesson = make_lesson(model, _example(draw_tokens, seed=3), "query_agnostic", CONFIG)
    found = {}
    for num_steps in (1, 60):
        config = dataclasses.replace(CONFIG, num_steps=num_steps)
        method = make_method("judgeq", soft_tokens=train_soft_tokens(model, [lesson], config, seed=0, model_digest="d"))
        with torch.no_grad():
            probe = run_probe(model, lesson.keys, lesson.values, method.probe)
        state = CacheState(
            keys=lesson.keys,
            values=lesson.values,
            queries=lesson.keys.new_zeros(model.spec.num_heads, model.spec.group_size, 0, model.spec.head_dim),
            positions=torch.arange(40)[None],
            num_kv_heads=model.spec.num_kv_heads,
            scaling=lesson.scaling,
            probe=probe,
        )
        best = method.score(state).topk(8, dim=1).indices
        found[num_steps] = float(lesson.attention.gather(1, best).sum())
    assert found[60] > found[1]
    most = float(lesson.attention.topk(8, dim=1).values.sum())
    assert found[60] > 0.9 * most


def test_the_model_is_left_as_it_was(model, draw_tokens):
    before = {name: value.clone() for name, value in model.network.state_dict().items()}
    lesson = make_lesson(model, _example(draw_tokens), "query_aware", CONFIG)
    kept = dataclasses.replace(lesson, keys=lesson.keys.clone(), values=lesson.values.clone())
    train_soft_tokens(model, [lesson], dataclasses.replace(CONFIG, num_steps=2), seed=0, model_digest="d")
    assert all(torch.equal(value, before[name]) for name, value in model.network.state_dict().items())
    assert all(parameter.grad is None for parameter in model.network.parameters())
    assert torch.equal(lesson.keys, kept.keys) and torch.equal(lesson.values, kept.values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": 0}, "num_tokens is 0, expected at least 1"),
        ({"num_steps": 0, "max_response_tokens": -1}, "num_steps is 0.*; max_response_tokens is -1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, expected more than 0"),
        ({"response": "sampled"}, "response is 'sampled', expected one of greedy, reference"),
    ],
)
def test_wrong_configurations_are_one_line(unchecked, fields, message):
    with pytest.raises(ValueError, match=message) as error:
        SoftTokenConfig(**fields)
    assert "\n" not in str(error.value)


def test_what_cannot_be_trained_on_is_refused(model, draw_tokens, fails_in_one_line):
    assert "no lessons" in fails_in_one_line(train_soft_tokens, model, [], CONFIG, seed=0, model_digest="d")
    lesson = make_lesson(model, _example(draw_tokens), "query_aware", CONFIG)
    broken = dataclasses.replace(lesson, attention=lesson.attention * torch.nan)
    assert "the loss of step 1 is nan" in fails_in_one_line(
        train_soft_tokens, model, [broken], CONFIG, seed=0, model_digest="d"
    )
