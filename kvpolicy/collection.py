"""Collecting: what one sample leaves for training, from one prefill."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.attention.importance import importance
from kvpolicy.attention.prefill import prefill
from kvpolicy.errors import InputError
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import check_setting, cut_sample


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """What is collected.

    Attributes:
        setting: Decides which tokens are ranked and which are their future.
        num_train_samples: Samples of each task to train on.
        num_heldout_samples: Samples of each task, of the validation split, to measure training on.
        samples_per_fragment: Samples that are written and committed at once.
    """

    setting: str = "query_agnostic"
    num_train_samples: int = 12
    num_heldout_samples: int = 3
    samples_per_fragment: int = 12

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: Naming the field, what was got and what was expected.
        """
        check_setting(self.setting)
        for name in ("num_train_samples", "num_heldout_samples", "samples_per_fragment"):
            if getattr(self, name) < 1:
                raise InputError(f"collect: {name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Keys, values and importance of the context of one sample."""

    keys: Float[Tensor, "head token dim"]
    values: Float[Tensor, "head token dim"]
    importance: Float[Tensor, "head token"]


def collect_trace(model: LanguageModel, example: EncodedSample, setting: str) -> Trace:
    """Run a sample through the model and keep its context's cache with what the future makes of it.

    The future is the reference continuation. Keys and values are views of the prefill.

    Raises:
        InputError: If the setting is unknown, the sample longer than the model's positions, or the attention that it
            receives not finite.
    """
    cut = cut_sample(example, setting)
    token_ids = torch.tensor(example.context_ids + example.question_ids + example.answer_ids)
    whole = prefill(model, token_ids, num_queries=cut.num_future)
    received = importance(whole, num_context=cut.num_context, num_future=cut.num_future)
    if not bool(received.isfinite().all()):
        raise InputError(
            f"sample {example.sample.sample_id}: the model's attention is not finite: its weights are damaged, or "
            f"{str(model.dtype).removeprefix('torch.')} is too small for it"
        )
    return Trace(keys=whole.keys[:, : cut.num_context], values=whole.values[:, : cut.num_context], importance=received)
