"""Traces of RULER's text-free tasks from the embedded model, in memory: what benchmarks train agents on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvpolicy.benchmarks.prompt_set import PromptConfig, generate_samples
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.text.encoded_sample import encode
from kvpolicy.training.collection import Trace, collect_trace
from kvpolicy.training.policy_training import TraceBatch


@dataclass(frozen=True)
class RulerTraces:
    """Traces to train on and traces to measure on, of the same heads."""

    train: Sequence[Trace]
    heldout: Sequence[Trace]

    @property
    def num_heads(self) -> int:
        return self.train[0].keys.shape[0]

    @property
    def head_dim(self) -> int:
        return self.train[0].keys.shape[2]

    def batches(self, *, sequences: int, seed: int) -> Iterator[TraceBatch]:
        """Batches without end, epoch after epoch, in an order of the seed."""
        generator = torch.Generator().manual_seed(seed)
        picked: list[Trace] = []
        while True:
            for index in torch.randperm(len(self.train), generator=generator).tolist():
                picked.append(self.train[index])
                if len(picked) == sequences:
                    yield padded(picked)
                    picked = []

    def heldout_batches(self) -> Iterator[TraceBatch]:
        return (padded([trace]) for trace in self.heldout)


def collect_ruler_traces(
    model: LanguageModel, *, num_train: int, num_heldout: int, length_tokens: int, heads: Sequence[int], seed: int
) -> RulerTraces:
    """Collect as `kvp collect` does, query-agnostic, the given numbers of samples of each task."""

    def collect(split: str, count: int) -> list[Trace]:
        prompts = generate_samples(
            PromptConfig(length_tokens=length_tokens),
            split=split,
            num_samples_per_task=count,
            seed=seed,
            tokenizer=model.tokenizer,
        )
        encoded = (encode(sample, model.tokenizer) for sample in prompts.samples)
        whole = (collect_trace(model, example, "query_agnostic") for example in encoded)
        kept = list(heads)
        return [Trace(keys=t.keys[kept], values=t.values[kept], importance=t.importance[kept]) for t in whole]

    return RulerTraces(train=collect("train", num_train), heldout=collect("validation", num_heldout))


def padded(traces: Sequence[Trace]) -> TraceBatch:
    """One batch of traces, padded to the longest."""
    lengths = [trace.keys.shape[1] for trace in traces]
    longest = max(lengths)

    def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        missing = [(0,) * (2 * (part.dim() - 2)) + (0, longest - part.shape[1]) for part in parts]
        padded_parts = [torch.nn.functional.pad(part, pad) for part, pad in zip(parts, missing, strict=True)]
        return torch.stack(padded_parts, dim=1)

    return TraceBatch(
        keys=stacked([trace.keys for trace in traces]),
        values=stacked([trace.values for trace in traces]),
        importance=stacked([trace.importance for trace in traces]),
        positions=torch.arange(longest).expand(len(traces), -1),
        mask=torch.arange(longest) < torch.tensor(lengths)[:, None],
    )
