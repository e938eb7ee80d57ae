"""Peak memory of one run over a long context, in a process of its own.

    python -m tests.benchmarks.long_context_memory MODEL_FOLDER full|kvp|snapkv|... TOKENS BUDGET CHUNK

Prints bytes: how far the resident memory rose above its level once the model was loaded and had run a few tokens. So
this is the KV cache, the activations, and what ranking takes. Freed memory goes back at once (`ENVIRONMENT`, which the
caller sets), so that what the allocator keeps for later is not counted.
"""

import ctypes
import sys
from pathlib import Path

import torch

from kvpolicy.attention.prefill import prefill
from kvpolicy.inference.loading import load_language_model
from kvpolicy.inference.streaming import StreamedCaches, StreamedRow
from kvpolicy.methods.base import Method
from kvpolicy.methods.registry import make_method
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.policies.agent import AgentConfig, BatchedAgents
from kvpolicy.policies.policy_set import PolicySet

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _method(model: LanguageModel, name: str) -> Method:
    if name != "kvp":
        return make_method(name)
    agents = BatchedAgents(  # what they were trained to makes no difference to what they take
        AgentConfig(),
        num_heads=model.spec.num_heads,
        head_dim=model.spec.head_dim,
        generator=torch.Generator().manual_seed(0),
    )
    agents.requires_grad_(False)
    return make_method(name, policy=PolicySet(agents=agents, spec=model.spec, model_digest="", training={}))


def main() -> None:
    folder, name, *numbers = sys.argv[1:]
    num_tokens, budget, chunk_tokens = map(int, numbers)
    torch.set_num_threads(2)
    model = load_language_model(Path(folder))
    token_ids = torch.randint(0, 40_000, (num_tokens,), generator=torch.Generator().manual_seed(0))
    method = None if name == "full" else _method(model, name)
    prefill(model, token_ids[:64], num_queries=1)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at the present level
    level = _resident_bytes("VmRSS")
    if method is None:
        prefill(model, token_ids, num_queries=1)
    else:
        caches = StreamedCaches(model, [StreamedRow(method=method, budget=budget)], interval_tokens=chunk_tokens)
        caches.run(model, token_ids[None], torch.arange(num_tokens)[None], num_logits=1)
        caches.evict()
    print(_resident_bytes("VmHWM") - level)


if __name__ == "__main__":
    main()
