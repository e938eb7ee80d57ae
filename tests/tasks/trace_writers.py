"""Collecting as `kvp collect` does, in processes that may be killed; imported by the processes themselves."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("LANCE_LOG", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import lance  # noqa: F401  # this and the next: what a writer would otherwise import when it needs it
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
import zarrs  # noqa: F401

from kvpolicy.training.collection import CollectConfig
from storage.environment import environment
from storage.home import Home
from tasks.collect import collect_fragment
from tasks.framework.references import ModelRef, PromptsRef

environment()


def collect_all(
    home: Path, model: ModelRef, prompts: PromptsRef, config: CollectConfig, collection: str, *, first: int
) -> None:
    """Collect every fragment, beginning with one of them."""
    torch.set_num_threads(1)  # not on import: the tests import this too
    starts = list(range(0, prompts.num_samples, config.samples_per_fragment))
    turn = starts.index(first)
    for start in starts[turn:] + starts[:turn]:
        collect_fragment.fn(Home.open(home), model, prompts, config, collection=collection, first=start)
