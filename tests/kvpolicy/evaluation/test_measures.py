"""Perplexity and the choice of options against transformers itself, on caches that keep everything."""

import math

import pytest
import torch

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.evaluation import evaluate_example
from kvpolicy.inference.streaming import StreamedCaches, StreamedRow, token_losses
from kvpolicy.text.encoded_sample import encode
from kvpolicy.text.sample import Sample

SETTINGS = ("query_agnostic", "query_aware")


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def network(eager_network):
    return eager_network("llama")


def _sample(task, **changes):
    fields = {
        "sample_id": f"{task_info(task).benchmark}/{task}/test/0/0/200",
        "benchmark": task_info(task).benchmark,
        "task": task,
        "split": "test",
        "context": "Iron is heavier than water and much harder than wood.",
        "question": "\nWhat floats?\nAnswer:",
        "answer_prefix": "",
        "answer": " wood, of course",
        "references": (" wood, of course",),
        "max_new_tokens": 0,
    }
    return Sample(**(fields | changes))


def _dialogue():
    turns = ("Is iron heavy?", "Yes, it sinks.", "And wood?", "It floats.", "Why?", "It is lighter.")
    return _sample(
        "dialogue",
        context="\n\n".join(turns[:3]),
        question="",
        answer="\n\n".join(turns[3:]),
        context_turns=turns[:3],
        answer_turns=turns[3:],
        references=(),
    )


def _figures(model, sample, contenders, metric, settings=SETTINGS, **options):
    example = encode(sample, model.tokenizer)
    result = evaluate_example(model, example, contenders, [24], settings=settings, **options)
    return {(score.setting, score.method): score.value for score in result.scores if score.metric == metric}


def test_perplexity_of_the_full_cache_is_transformers_own_loss(model, network, make_contenders):
    sample = _dialogue()
    example = encode(sample, model.tokenizer)
    ids = torch.tensor([example.context_ids + example.answer_ids])
    labels = ids.clone()
    labels[:, : len(example.context_ids)] = -100
    with torch.no_grad():
        loss = network(input_ids=ids, labels=labels).loss
    found = _figures(model, sample, make_contenders(model, ["full", "knorm"]), "perplexity", SETTINGS[:1])
    assert found["query_agnostic", "full"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["query_agnostic", "knorm"] != pytest.approx(math.exp(loss), rel=1e-3)


def test_perplexity_after_chunks_is_that_of_a_stream(model, make_contenders):
    """Its first token, too, is predicted by what the chunks before it left."""
    contenders, sample = make_contenders(model, ["knorm"]), _dialogue()
    found = _figures(model, sample, contenders, "perplexity", SETTINGS[:1], chunk_tokens=7)
    example = encode(sample, model.tokenizer)
    context, future = torch.tensor([example.context_ids]), torch.tensor(example.answer_ids)
    stream = StreamedCaches(model, [StreamedRow(method=contenders[0].method, budget=24)], interval_tokens=7)
    logits = stream.run(model, context, torch.arange(context.shape[1])[None], num_logits=1)
    first = torch.nn.functional.cross_entropy(logits[:, -1].float(), future[:1])
    stream.evict_every(len(future))
    rest = token_losses(model, stream, future)[0]
    assert found["query_agnostic", "knorm"] == pytest.approx(math.exp(torch.cat([first[None], rest]).mean()), rel=1e-4)


@pytest.mark.parametrize("setting", SETTINGS)
def test_options_are_chosen_by_the_likelihood_that_transformers_gives_them(
    model, network, make_contenders, setting, monkeypatch
):
    options = (" wood, of course", " iron", " a very heavy stone", " water")
    sample = _sample("arc_challenge", options=options)
    example = encode(sample, model.tokenizer)
    prompt = example.context_ids + example.question_ids
    expected = []
    for option in example.option_ids:
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([prompt + option])).logits[0].double().log_softmax(-1)
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(option) - 1)
        expected.append(float(logits[rows, torch.tensor(option)].sum()))
    seen = []

    def note(sample, likelihoods):
        seen.append(likelihoods)
        return {"accuracy": float(max(likelihoods) == likelihoods[0])}

    monkeypatch.setattr("kvpolicy.evaluation.measure.score_options", note)
    found = _figures(model, sample, make_contenders(model, ["full"]), "accuracy", [setting])
    assert seen == [pytest.approx(expected, abs=1e-3)]
    assert found[setting, "full"] == float(max(expected) == expected[0])


def test_every_option_starts_from_the_same_cache(model, make_contenders):
    """The same options in another order have the same likelihoods, so the choice does not depend on the order."""
    options = (" wood, of course", " iron", " a very heavy stone", " water")
    contenders = make_contenders(model, ["knorm", "snapkv"])
    for answer in options:
        forward = _figures(model, _sample("arc_challenge", options=options, answer=answer), contenders, "accuracy")
        backward = _figures(
            model, _sample("arc_challenge", options=options[::-1], answer=answer), contenders, "accuracy"
        )
        assert forward == backward
