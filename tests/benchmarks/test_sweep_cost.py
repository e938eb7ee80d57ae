"""What it costs to judge 8 methods at 8 budgets on one example of 4K tokens, against running each pair on its own.

The sweep shares one prefill and decodes all rows as a batch. On its own, each pair pays for prefill, scoring,
compaction and decoding; eight of the 64 are run (each method once, each budget once) and their mean stands for all.
Printed by `make bench`.
"""

import time
from typing import Any

import pytest
import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from kvpolicy.evaluation import Contender, evaluate_example
from kvpolicy.evaluation.contexts import context_state
from kvpolicy.inference.cache import CompactedCache
from kvpolicy.inference.decoding import decode_greedily
from kvpolicy.methods.base import Method, kept_by_method
from kvpolicy.methods.registry import make_method
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.policy_set import PolicySet
from kvpolicy.text.encoded_sample import EncodedSample, encode

pytestmark = pytest.mark.benchmark

METHODS = ("kvp", "streaming_llm", "knorm", "keydiff", "lagkv", "snapkv", "tova", "h2o")
BUDGETS = (64, 128, 256, 384, 512, 768, 1024, 2048)
ANSWER_TOKENS = 32
LIMIT = 1 / 8


@pytest.mark.timeout(1800)
def test_the_sweep_against_each_pair_on_its_own(embedded_model: Any) -> None:
    config = PromptConfig(tasks=("niah_single_1",), length_tokens=4096)
    tokenizer = embedded_model.tokenizer
    (sample,) = generate_samples(config, split="test", num_samples_per_task=1, seed=0, tokenizer=tokenizer).samples
    example = encode(sample, tokenizer)
    contenders = [Contender(method=_method(embedded_model, name), seed=0) for name in METHODS]
    _answer_alone(embedded_model, example, contenders[0].method, BUDGETS[0])  # warms up

    started = time.perf_counter()
    result = evaluate_example(
        embedded_model,
        example,
        contenders,
        BUDGETS,
        settings=("query_agnostic",),
        max_answer_tokens=ANSWER_TOKENS,
    )
    sweep_s = time.perf_counter() - started
    answered = [score for score in result.scores if score.metric == "string_match"]
    assert len(answered) == len(METHODS) * len(BUDGETS)

    alone_s = []
    for contender, budget in zip(contenders, BUDGETS, strict=True):
        started = time.perf_counter()
        _answer_alone(embedded_model, example, contender.method, budget)
        alone_s.append(time.perf_counter() - started)
    mean_s = sum(alone_s) / len(alone_s)
    ratio = sweep_s / (mean_s * len(METHODS) * len(BUDGETS))
    print(f"\n{len(example.context_ids)} tokens of context, {len(METHODS)} methods x {len(BUDGETS)} budgets")
    print(f"  the sweep, with fidelity and importance:  {sweep_s:6.1f} s")
    spread = f"{min(alone_s):.1f} to {max(alone_s):.1f}"
    print(f"  one pair on its own, mean of {len(alone_s)}:          {mean_s:6.1f} s ({spread})")
    print(f"  sweep / all pairs on their own:           {ratio:.3f}, asked for at most {LIMIT}: ", end="")
    print("holds" if ratio <= LIMIT else "falls short")


def _method(model: Any, name: str) -> Method:
    if name != "kvp":
        return make_method(name)
    agents = BatchedAgents(  # what they were trained to makes no difference to what they cost
        AgentConfig(),
        num_heads=model.spec.num_heads,
        head_dim=model.spec.head_dim,
        generator=torch.Generator().manual_seed(0),
    )
    return make_method(name, policy=PolicySet(agents=agents, spec=model.spec, model_digest="", training={}))


def _answer_alone(model: Any, example: EncodedSample, method: Method, budget: int) -> list[int]:
    """Prefill, compress, run the question, decode: as someone does who wants this one answer."""
    context, question = torch.tensor(example.context_ids), torch.tensor(example.question_ids)
    n = len(context)
    needed = n if method.num_queries is None else method.num_queries
    whole = prefill(model, context, num_queries=max(1, needed))
    state = context_state(whole, n)
    cache = CompactedCache(
        whole.keys,
        whole.values,
        [kept_by_method(method, state, method.score(state), budget)],
        num_kv_heads=whole.num_kv_heads,
        num_new_tokens=len(question) + ANSWER_TOKENS,
    )
    logits = cache.run(model, question[None], n + torch.arange(len(question))[None], num_logits=1)
    return decode_greedily(
        model,
        cache,
        logits[:, -1].argmax(dim=-1),
        first_position=n + len(question),
        max_new_tokens=ANSWER_TOKENS,
    )[0]
