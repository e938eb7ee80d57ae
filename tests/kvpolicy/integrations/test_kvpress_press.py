"""The press on real caches of transformers, through kvpress' own hooks: it keeps what our own ranking keeps."""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch
from kvpress.utils import compute_n_kept
from transformers import DynamicCache, pipeline

import kvpolicy.integrations.kvpress as module
from kvpolicy import compressed_generate, load_model, load_policy
from kvpolicy.attention.prefill import prefill
from kvpolicy.integrations.kvpress import PolicyPress
from kvpolicy.methods.ranking import kept_positions
from kvpolicy.models.reference import find_model
from kvpolicy.text.encoded_sample import encode_message
from tests.drawn_policy import SMALL, draw_policy
from tests.kvpolicy.integrations.pressed import indices_of, load_network, pressed

FAMILIES = ("llama", "llama_mha", "qwen2", "qwen3", "phi3", "mistral")  # those that kvpress knows
NUM_TOKENS = 90
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("ratio", [0.25, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_press_keeps_what_our_ranking_keeps(tiny_model_folder, draw_tokens, family, ratio):
    folder = tiny_model_folder(family)
    model, tokens = load_model(str(folder), dtype="float32"), draw_tokens(NUM_TOKENS)
    policy = draw_policy(model)
    context = prefill(model, tokens, num_queries=0)
    scores = policy.score(context.keys, context.values, torch.arange(NUM_TOKENS)[None])
    expected = kept_positions(scores, compute_n_kept(NUM_TOKENS, ratio))
    layers = pressed(load_network(folder), PolicyPress(compression_ratio=ratio, policy=policy), tokens[None])
    whole = torch.cat([context.keys, context.values], dim=-1)
    found = torch.cat([torch.cat([keys[0], values[0]], dim=-1) for keys, values in layers])
    assert torch.equal(indices_of(whole, found), expected)
    assert not torch.equal(expected[0], expected[-1])  # heads do choose each for itself


def test_ties_go_by_position_as_in_our_ranking(tiny_model_folder, draw_tokens):
    folder = tiny_model_folder("llama")
    model, tokens = load_model(str(folder), dtype="float32"), draw_tokens(NUM_TOKENS)
    context = prefill(model, tokens, num_queries=0)
    press = PolicyPress(compression_ratio=0.5, policy=draw_policy(model, constant=True))
    found = torch.cat([keys[0] for keys, _ in pressed(load_network(folder), press, tokens[None])])
    kept = [*range(45 - 16), *range(NUM_TOKENS - 16, NUM_TOKENS)]
    assert indices_of(context.keys, found).tolist() == [kept] * model.spec.num_heads


def test_rows_of_a_batch_are_ranked_each_for_itself(tiny_model_folder, draw_tokens):
    folder = tiny_model_folder("llama")
    model, tokens = load_model(str(folder), dtype="float32"), draw_tokens(2, NUM_TOKENS)
    policy = draw_policy(model, dataclasses.replace(SMALL, position="table"))
    network, press = load_network(folder), PolicyPress(compression_ratio=0.6, policy=policy)
    together = pressed(network, press, tokens)
    for row in range(2):
        for (keys, values), (own_keys, own_values) in zip(
            together, pressed(network, press, tokens[row : row + 1]), strict=True
        ):
            torch.testing.assert_close(keys[row], own_keys[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values[row], own_values[0], atol=1e-4, rtol=1e-4)


def test_transformers_answers_on_the_pressed_cache_as_we_do_on_ours(tiny_model_folder, tmp_path):
    folder = tiny_model_folder("llama")
    model = load_model(str(folder), dtype="float32")
    draw_policy(model).save(tmp_path)
    policy, prompt, num_new = load_policy(tmp_path), "The pass key is 4821. What is the pass key? " * 2, 10
    ids = torch.tensor([encode_message(prompt, model.tokenizer)])
    num_tokens = ids.shape[1]
    ratio = 0.7
    budget = compute_n_kept(num_tokens, ratio)
    expected = compressed_generate(model, policy, prompt, budget=budget, max_new_tokens=num_new).token_ids
    network, cache = load_network(folder), DynamicCache()
    with torch.no_grad(), PolicyPress(compression_ratio=ratio, policy=policy)(network):
        token = network(ids, past_key_values=cache).logits[0, -1].argmax()
    assert cache.get_seq_length() == budget
    answer = []
    with torch.no_grad():
        for step in range(num_new):
            answer.append(int(token))
            position = torch.tensor([num_tokens + step])
            output = network(
                token.view(1, 1), past_key_values=cache, position_ids=position[None], cache_position=position
            )
            token = output.logits[0, -1].argmax()
    assert tuple(answer[: len(expected)]) == expected
    assert len(expected) == num_new or answer[len(expected)] == model.tokenizer.eos_token_id


def test_a_ratio_of_nothing_evicts_nothing(tiny_model_folder, draw_tokens):
    folder = tiny_model_folder("llama")
    model = load_model(str(folder), dtype="float32")
    (keys, _), *_ = pressed(load_network(folder), PolicyPress(policy=draw_policy(model)), draw_tokens(1, NUM_TOKENS))
    assert keys.shape[2] == NUM_TOKENS


def test_another_model_is_refused_before_anything_is_run(tiny_model_folder, draw_tokens, fails_in_one_line):
    model = load_model(str(tiny_model_folder("llama")), dtype="float32")
    other = load_network(tiny_model_folder("llama", rms_norm_eps=1e-4))
    press = PolicyPress(compression_ratio=0.5, policy=draw_policy(model))
    message = fails_in_one_line(pressed, other, press, draw_tokens(1, NUM_TOKENS))
    assert f"trained for model {model.digest[:16]}" in message
    renamed = load_network(tiny_model_folder("llama"))
    renamed.name_or_path = renamed.config._name_or_path = "somebody's model"
    assert "pass model_digest" in fails_in_one_line(pressed, renamed, press, draw_tokens(1, NUM_TOKENS))
    told = dataclasses.replace(press, model_digest=model.digest)
    assert pressed(renamed, told, draw_tokens(1, NUM_TOKENS))[0][0].shape[2] == NUM_TOKENS // 2
    shallow = load_network(tiny_model_folder("llama", num_hidden_layers=2))
    assert "num_layers=2" in fails_in_one_line(pressed, shallow, told, draw_tokens(1, NUM_TOKENS))


def test_a_models_files_are_read_once(tiny_model_folder, draw_tokens, monkeypatch):
    folder = tiny_model_folder("llama")
    network = load_network(folder)
    press = PolicyPress(compression_ratio=0.5, policy=draw_policy(load_model(str(folder), dtype="float32")))
    names = []
    monkeypatch.setattr(module, "find_model", lambda name: names.append(name) or find_model(name))
    for seed in range(2):
        pressed(network, press, draw_tokens(1, NUM_TOKENS, seed=seed))
    assert names == [str(folder)]
    pressed(load_network(folder), press, draw_tokens(1, NUM_TOKENS))  # another model, whatever its name
    assert len(names) == 2


@pytest.mark.parametrize(("num_tokens", "ratio"), [(NUM_TOKENS, 0.9), (19, 0.1)])
def test_fewer_tokens_than_are_always_kept_are_refused(
    tiny_model_folder, draw_tokens, fails_in_one_line, num_tokens, ratio
):
    folder = tiny_model_folder("llama")
    press = PolicyPress(compression_ratio=ratio, policy=draw_policy(load_model(str(folder), dtype="float32")))
    assert "expected from 20" in fails_in_one_line(pressed, load_network(folder), press, draw_tokens(1, num_tokens))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_is_refused_and_a_mask_without_any_is_fine(
    tiny_model_folder, draw_tokens, fails_in_one_line, attention
):
    folder = tiny_model_folder("llama")
    network, tokens = load_network(folder), draw_tokens(2, NUM_TOKENS)
    network.set_attn_implementation(attention)
    press = PolicyPress(compression_ratio=0.5, policy=draw_policy(load_model(str(folder), dtype="float32")))
    mask = torch.ones_like(tokens)
    with torch.no_grad(), press(network):
        network(tokens, attention_mask=mask, past_key_values=DynamicCache())
        mask[0, :30] = 0
        message = fails_in_one_line(network, tokens, attention_mask=mask, past_key_values=DynamicCache())
    assert "padded" in message and "one after the other" in message


def test_it_works_in_the_pipeline_of_kvpress(tiny_model_folder):
    folder = tiny_model_folder("llama")
    model = load_model(str(folder), dtype="float32")
    press = PolicyPress(compression_ratio=0.5, policy=draw_policy(model))
    ask = pipeline("kv-press-text-generation", model=load_network(folder), tokenizer=model.tokenizer)
    cache = DynamicCache()
    answer = ask("The pass key is 4821. " * 4, question="Which is it?", press=press, cache=cache, max_new_tokens=4)
    assert isinstance(answer["answer"], str)
    assert cache.get_seq_length() < 80


def test_the_example_of_the_page_runs(tiny_model_folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(tiny_model_folder("llama"), tmp_path / "my-model")
    draw_policy(load_model(str(tmp_path / "my-model"), dtype="float32")).save(tmp_path / "my-policy")
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.+?)```", (ROOT / "docs" / "using.md").read_text(), flags=re.DOTALL)
    (program,) = (program for program in programs if "kvpress" in program)
    exec(compile(program, "docs/using.md", "exec"), {})
    assert capsys.readouterr().out.endswith("\n")
