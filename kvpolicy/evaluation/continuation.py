"""What comes after the context of an example: the tokens that run on compacted caches, and what the full cache says."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.prefill import Prefill
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import Cut


@dataclass(frozen=True, kw_only=True, eq=False)
class Continuation:
    """The future of one example in one setting.

    Attributes:
        example: The example.
        cut: Where its context ends.
        whole: The prefill of the whole sequence, whose logits begin after the last token of the context or earlier.
    """

    example: EncodedSample
    cut: Cut
    whole: Prefill

    @property
    def context_ids(self) -> Int[Tensor, "context"]:
        """What is ranked and compressed."""
        ids = self.example.context_ids + self.example.question_ids
        return torch.tensor(ids[: self.cut.num_context])

    @property
    def token_ids(self) -> Int[Tensor, "future"]:
        """Question and reference answer."""
        ids = self.example.context_ids + self.example.question_ids + self.example.answer_ids
        return torch.tensor(ids[self.cut.num_context :])

    def positions(self, num_tokens: int, *, num_rows: int, first: int = 0) -> Int[Tensor, "row token"]:
        """Original positions of `num_tokens` tokens, the first of which is number `first` of the future."""
        return (self.cut.num_context + first + torch.arange(num_tokens)).expand(num_rows, -1)

    @property
    def full_logits(self) -> Float[Tensor, "prediction vocab"]:
        """What the full cache predicts after the context's last token and after each token of the future."""
        return self.whole.logits[-self.cut.num_future - 1 :]
