"""The compacted cache: a batch of caches in which evicted entries are physically gone.

Every row of the batch is one variant of the same example (a method at a budget); rows may keep different numbers of
entries. Kept entries lie at the right end of the row's past, so that new tokens follow in the same slots for all rows;
positions stay those of the original sequence.

Legend: R rows, L layers, K KV heads of a layer, S slots.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.session import attend_masked, attention_session
from kvpolicy.models.language_model import LanguageModel


class CompactedCache:
    """Keys and values of the kept entries of each row, with room for the tokens that follow.

    It is the attention session of the passes that run on it: new tokens see the row's kept entries and each other.
    """

    def __init__(
        self,
        keys: Float[Tensor, "head token dim"],
        values: Float[Tensor, "head token dim"],
        kept: Sequence[Int[Tensor, "head _"]],
        *,
        num_kv_heads: int,
        num_new_tokens: int,
    ) -> None:
        """Gather the kept entries of each row into new storage.

        Args:
            keys: The uncompacted context's keys, layer-major.
            values: Its values.
            kept: For each row, the kept indices of every head, ascending; rows may keep different numbers.
            num_kv_heads: KV heads in a layer.
            num_new_tokens: Tokens for which room is made.
        """
        budgets = torch.tensor([row.shape[1] for row in kept])
        self.num_past_tokens = int(budgets.max())
        num_heads, _, dim = keys.shape
        shape = (num_heads // num_kv_heads, len(kept), num_kv_heads, self.num_past_tokens + num_new_tokens, dim)
        self._keys, self._values = keys.new_zeros(shape), values.new_zeros(shape)
        for row, indices in enumerate(kept):  # rows are ragged; within one, all heads move at once
            slots = slice(self.num_past_tokens - indices.shape[1], self.num_past_tokens)
            gathered = indices.to(keys.device)[..., None].expand(-1, -1, dim)
            by_layer = (shape[0], num_kv_heads, indices.shape[1], dim)
            self._keys[:, row, :, slots] = keys.gather(1, gathered).view(by_layer)
            self._values[:, row, :, slots] = values.gather(1, gathered).view(by_layer)
        self._valid = torch.arange(shape[3]) >= (self.num_past_tokens - budgets)[:, None]
        self._valid = self._valid.to(keys.device)
        self._mask: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Caches in the batch."""
        return int(self._keys.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes that keys and values occupy, room for new tokens included."""
        return 2 * self._keys.numel() * self._keys.element_size()

    def run(
        self,
        model: LanguageModel,
        token_ids: Int[Tensor, "row token"],
        positions: Int[Tensor, "row token"],
        num_logits: int,
    ) -> Float[Tensor, "row logit vocab"]:
        """Run new tokens on the cache, append their entries, and return the logits after the last of them."""
        num_new = token_ids.shape[1]
        end = self.num_past_tokens + num_new
        slots = torch.arange(end, device=self._valid.device)
        own = self.num_past_tokens + torch.arange(num_new, device=self._valid.device)
        visible = self._valid[:, None, None, :end] & (slots <= own[:, None])
        # One additive mask for all layers: from a Boolean one SDPA would make it anew in each.
        self._mask = torch.zeros(visible.shape, dtype=self._keys.dtype, device=visible.device)
        self._mask = self._mask.masked_fill_(~visible, -torch.inf).repeat(1, 1, model.spec.group_size, 1)
        try:
            with attention_session(self):
                logits = model.logits(token_ids, positions, num_logits)
        finally:
            self._mask = None
        self.num_past_tokens = end
        return logits

    def crop(self, num_tokens: int) -> None:
        """Forget the newest entries, so that `num_tokens` slots remain."""
        self.num_past_tokens = num_tokens

    def keep_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Forget all other rows."""
        rows = rows.to(self._valid.device)
        self._keys, self._values, self._valid = self._keys[:, rows], self._values[:, rows], self._valid[rows]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Append the layer's new entries and attend to everything that each token may see."""
        assert self._mask is not None, "attention outside of run"
        end = self.num_past_tokens + key.shape[2]
        self._keys[layer, :, :, self.num_past_tokens : end] = key
        self._values[layer, :, :, self.num_past_tokens : end] = value
        past = (self._keys[layer, :, :, :end], self._values[layer, :, :, :end])
        return attend_masked(query, *past, scaling, mask=self._mask)
