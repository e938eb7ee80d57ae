"""The compacted cache: a batch of caches in which evicted entries are physically gone.

Every row of the batch is one variant of the same example (a method at a budget); rows may keep different numbers of
entries, and so may the heads of a row. Kept entries lie at the right end of the past, so that new tokens follow in the
same slots for all; positions stay those of the original sequence.

Legend: R rows, L layers, K KV heads of a layer, S slots.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpolicy.attention.session import attend_masked, attention_session
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.ranking import NOT_KEPT


class CompactedCache:
    """Keys and values of the kept entries of each row, with room for the tokens that follow.

    It is the attention session of the passes that run on it: new tokens see the kept entries of their row and head, and
    each other.
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
            kept: For each row, the kept indices of every head, ascending, which are also their positions. Rows may keep
                different numbers; a head that keeps fewer than others of its row has NOT_KEPT on the left.
            num_kv_heads: KV heads in a layer.
            num_new_tokens: Tokens for which room is made.
        """
        self.num_past_tokens = max(row.shape[1] for row in kept)
        num_heads, _, dim = keys.shape
        by_layer = (num_heads // num_kv_heads, num_kv_heads)
        slots = (len(kept), *by_layer, self.num_past_tokens + num_new_tokens)
        self._keys, self._values = keys.new_zeros(*slots, dim), values.new_zeros(*slots, dim)
        # Original positions; NOT_KEPT where a slot holds nothing, which no token may see.
        self._positions = torch.full(slots, NOT_KEPT, device=keys.device)
        for row, indices in enumerate(kept):  # rows are ragged; within one, all heads move at once
            num_kept = indices.shape[1]
            own = slice(self.num_past_tokens - num_kept, self.num_past_tokens)
            gathered = indices.to(keys.device).clamp_min(0)[..., None].expand(-1, -1, dim)
            self._keys[row, :, :, own] = keys.gather(1, gathered).view(*by_layer, num_kept, dim)
            self._values[row, :, :, own] = values.gather(1, gathered).view(*by_layer, num_kept, dim)
            self._positions[row, :, :, own] = indices.reshape(*by_layer, num_kept)
        self._is_ragged = any(bool((row == NOT_KEPT).any()) for row in kept)
        self._mask: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Caches in the batch."""
        return int(self._keys.shape[0])

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
        end = self.num_past_tokens + token_ids.shape[1]
        self._positions[..., self.num_past_tokens : end] = positions.to(self._positions.device)[:, None, None]
        if not self._is_ragged:  # one mask for all heads of all layers
            self._mask = self._additive_mask(self._positions[:, 0, :1, :end] != NOT_KEPT, model.spec.group_size)
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
        rows = rows.to(self._keys.device)
        self._keys, self._values, self._positions = self._keys[rows], self._values[rows], self._positions[rows]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Append the layer's new entries and attend to everything that each token may see."""
        end = self.num_past_tokens + key.shape[2]
        self._keys[:, layer, :, self.num_past_tokens : end] = key
        self._values[:, layer, :, self.num_past_tokens : end] = value
        past = (self._keys[:, layer, :, :end], self._values[:, layer, :, :end])
        mask = self._mask
        if self._is_ragged:
            group_size = query.shape[1] // key.shape[1]
            mask = self._additive_mask(self._positions[:, layer, :, :end] != NOT_KEPT, group_size)
        assert mask is not None, "attention outside of run"
        return attend_masked(query, *past, scaling, mask=mask)

    def _additive_mask(
        self, is_held: Bool[Tensor, "row head slot"], group_size: int
    ) -> Float[Tensor, "row head token_of_group slot"]:
        """What SDPA adds to the logits of the newest tokens; from a Boolean mask it would make this in every layer."""
        slots = torch.arange(is_held.shape[2], device=is_held.device)
        visible = is_held[:, :, None] & (slots <= slots[self.num_past_tokens :, None])
        mask = torch.zeros(visible.shape, dtype=self._keys.dtype, device=visible.device)
        return mask.masked_fill_(~visible, -torch.inf).repeat(1, 1, group_size, 1)
