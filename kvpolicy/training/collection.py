"""Collecting: the traces of one sample for training, from one prefill."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.attention.importance import importance
from kvpolicy.attention.prefill import prefill
from kvpolicy.config.settings import Positive, Settings
from kvpolicy.errors import InputError
from kvpolicy.models.finite import not_finite_error
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.names import Compression
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import Setting, cut_sample


@dataclass(frozen=True, kw_only=True)
class CollectConfig(Settings):
    """Which traces are collected."""

    setting: Setting = "query_agnostic"
    """Decides which tokens are ranked and which are their future."""
    num_train_samples: Positive = 12
    """Samples of each task to train on."""
    num_heldout_samples: Positive = 3
    """Samples of each task, of the validation split, to measure training on."""
    samples_per_fragment: Positive = 12
    """Samples that are written and committed at once."""
    stored_dtype: Literal["model", "float8_e4m3fn"] = "model"
    """Type of stored keys and values: the `model`'s own, or 8-bit floats (`float8_e4m3fn`), half the size."""
    compression: Compression = "none"
    """Lossless compression of stored traces: `none`, `zstd` or `shuffled_zstd`."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Keys, values and importance of the context of one sample."""

    keys: Float[Tensor, "head token dim"]
    values: Float[Tensor, "head token dim"]
    importance: Float[Tensor, "head token"]


def collect_trace(model: LanguageModel, example: EncodedSample, setting: str, *, stored_dtype: str = "model") -> Trace:
    """Run a sample through the model and keep its context's cache with the importance of its entries.

    The future is the reference continuation. Keys and values are views of the prefill, unless they are narrowed.

    Raises:
        InputError: If the setting is unknown, the sample longer than the model's positions, what the model computes not
            finite, or a key or value beyond what the stored type holds.
    """
    cut = cut_sample(example, setting)
    token_ids = torch.tensor(example.context_ids + example.question_ids + example.answer_ids)
    try:
        whole = prefill(model, token_ids, num_queries=cut.num_future)
    except InputError as error:
        raise InputError(f"sample {example.sample.sample_id}: {error}") from error
    received = importance(whole, num_context=cut.num_context, num_future=cut.num_future)
    if not bool(received.isfinite().all()):
        layer = int((~received.isfinite().all(dim=1)).nonzero()[0]) // model.spec.num_kv_heads
        wrong = not_finite_error(f"attention in layer {layer}", model.dtype)
        raise InputError(f"sample {example.sample.sample_id}: {wrong}") from wrong
    keys, values = whole.keys[:, : cut.num_context], whole.values[:, : cut.num_context]
    if stored_dtype != "model":
        keys, values = (_narrowed(part, getattr(torch, stored_dtype), example) for part in (keys, values))
    return Trace(keys=keys, values=values, importance=received)


def _narrowed(part: Tensor, dtype: torch.dtype, example: EncodedSample) -> Tensor:
    largest, most = float(part.abs().max()), torch.finfo(dtype).max
    if largest > most:
        raise InputError(
            f"sample {example.sample.sample_id}: a key or value is {largest:.0f} and 8-bit floats reach {most:.0f}: "
            "collect this model with stored_dtype = model"
        )
    return part.to(dtype)
