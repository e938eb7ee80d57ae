"""kvpress wraps every attention function that is registered when it is imported: ours works before and after."""

import json
import subprocess
import sys

import pytest

from kvpolicy import compressed_generate, load_model, load_policy
from tests.drawn_policy import draw_policy

PROMPT = "The pass key is 4821. What is the pass key? " * 2
PROGRAM = f"""
import json, sys
order, folder, policy_folder = sys.argv[1:]
if order == "kvpress first":
    import kvpress
import torch
from kvpolicy import compressed_generate, load_model, load_policy

first = load_model(folder, dtype="float32")
import kvpress
from transformers import AutoModelForCausalLM, DynamicCache
from kvpolicy.integrations.kvpress import PolicyPress

second = load_model(folder, dtype="float32")
policy = load_policy(policy_folder)
answers = [
    compressed_generate(model, policy, {PROMPT!r}, budget=40, max_new_tokens=8).token_ids for model in (first, second)
]

def decoded(network, wrap):
    cache, tokens = DynamicCache(), torch.arange(90)[None]
    with torch.no_grad(), wrap(PolicyPress(compression_ratio=0.7, policy=policy))(network):
        network(tokens, past_key_values=cache)
        return network(torch.tensor([[90]]), past_key_values=cache).logits[0, -1]

plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
masked = decoded(plain, lambda press: kvpress.AdaKVPress(press, 1.0))
differences = [
    (decoded(model.network, lambda press: kvpress.AdaKVPress(press, 1.0)) - masked).abs().max().item()
    for model in (first, second)
]
whole = (decoded(plain, lambda press: PolicyPress(policy=policy)) - masked).abs().max().item()
print(json.dumps({{"answers": answers, "differences": differences, "whole": whole}}))
"""


@pytest.mark.parametrize("order", ["kvpress first", "a model first"])
def test_models_work_and_are_pressed_whichever_was_first(tiny_model_folder, tmp_path, order):
    folder = tiny_model_folder("llama")
    model = load_model(str(folder), dtype="float32")
    draw_policy(model).save(tmp_path)
    expected = compressed_generate(model, load_policy(tmp_path), PROMPT, budget=40, max_new_tokens=8).token_ids
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, order, str(folder), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    printed = json.loads(ended.stdout.splitlines()[-1])
    assert printed["answers"] == [list(expected)] * 2
    assert max(printed["differences"]) < 1e-4  # masks reach our attention function
    assert printed["whole"] > 0.01  # and they do something
