"""Small traces to write; light enough to be imported by the tests' writer processes."""

from __future__ import annotations

import torch

from storage.traces.store import TraceSample, TraceStore, Written

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def trace_sample(name: str, tokens: int, split: str = "train") -> TraceSample:
    return TraceSample(
        sample_id=name,
        benchmark="ruler",
        task="niah_single",
        split=split,
        setting="query_agnostic",
        seed=7,
        prompt_digest="0" * 64,
        context_tokens=tokens,
    )


def tensors(
    heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "keys": torch.randn(heads, tokens, dim, generator=generator).to(dtype),
        "values": torch.randn(heads, tokens, dim, generator=generator).to(dtype),
        "importance": torch.rand(heads, tokens, generator=generator),
    }


def write(
    store: TraceStore, samples: list[TraceSample], collection: str = "c", *, seed: int = 0, heads: int = 3
) -> Written:
    content = tensors(heads, sum(sample.context_tokens for sample in samples), 4, seed=seed)
    return store.write_fragment(collection=collection, model_digest="m", samples=samples, **content)
