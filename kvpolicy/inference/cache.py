"""The compacted cache: a batch of caches in which evicted entries are physically gone.

Every row of the batch is one variant of the same example (a method at a budget); rows may keep different numbers of
entries, and so may the heads of a row. Kept entries lie at the right end of the past, so that new tokens follow in the
same slots for all; positions stay those of the original sequence. What to keep is decided elsewhere
(kvpolicy.methods.ranking).
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.session import attend_causally, attend_masked, attention_session
from kvpolicy.methods.base import CacheState
from kvpolicy.methods.ranking import NOT_KEPT
from kvpolicy.models.finite import require_finite_entries
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.models.rotary import Rotary

_MOST_PADDING = 2
"""Slots that rows of one attention call have for each entry of the row that holds fewest."""


@runtime_checkable
class Continuable(Protocol):
    """A batch of caches that tokens can follow: compacted once, or by itself as it grows."""

    @property
    def num_rows(self) -> int:
        """Caches in the batch."""

    def run(
        self,
        model: LanguageModel,
        token_ids: Int[Tensor, "row token"],
        positions: Int[Tensor, "row token"],
        num_logits: int,
    ) -> Float[Tensor, "row logit vocab"]:
        """Run new tokens, append their entries, and return the logits after the last of them."""

    def keep_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Forget all other rows."""


def run_alike(
    model: LanguageModel,
    cache: Continuable,
    token_ids: Int[Tensor, "token"],
    *,
    first_position: int,
    num_logits: int | None = None,
) -> Float[Tensor, "row logit vocab"]:
    """Run the same tokens on every row, and return the logits after the last of them, or after each.

    Args:
        model: The model.
        cache: The rows.
        token_ids: New tokens.
        first_position: Original position of the first of them.
        num_logits: After how many of the last tokens to return next-token logits; None for all.
    """
    num_tokens = len(token_ids)
    ids, positions = (row.expand(cache.num_rows, -1) for row in (token_ids, first_position + torch.arange(num_tokens)))
    return cache.run(model, ids, positions, num_logits=num_tokens if num_logits is None else num_logits)


class _Block(NamedTuple):
    """Rows that attend in one call: to which slots, and what is added to their logits."""

    rows: slice
    slots: slice
    mask: Float[Tensor, "row head token_of_group slot"]


class CompactedCache:
    """Keys and values of the kept entries of each row, with room for the tokens that follow.

    It is the attention session of the passes that run on it: new tokens see the kept entries of their row and head, and
    each other.

    Attributes:
        num_past_tokens: Slots in use, equally many in every row and head; those that a row does not need hold nothing.
        num_positions: Positions up to the newest token of any row, as of the last pass.
    """

    def __init__(
        self,
        keys: Float[Tensor, "head token dim"],
        values: Float[Tensor, "head token dim"],
        kept: Sequence[Int[Tensor, "head _"]],
        *,
        num_kv_heads: int,
        num_new_tokens: int,
        num_queries: int = 0,
    ) -> None:
        """Gather the kept entries of each row into new storage.

        Args:
            keys: The uncompacted context's keys, layer-major.
            values: Its values.
            kept: For each row, the kept indices of every head, ascending, which are also their positions. Rows may keep
                different numbers; a head that keeps fewer than others of its row has NOT_KEPT on the left.
            num_kv_heads: KV heads in a layer.
            num_new_tokens: Tokens for which room is made.
            num_queries: Queries of the newest tokens that are remembered, for ranking the cache again.
        """
        self.num_past_tokens = max(row.shape[1] for row in kept)
        num_heads, _, dim = keys.shape
        by_layer = (num_heads // num_kv_heads, num_kv_heads)
        slots = (len(kept), *by_layer, self.num_past_tokens + num_new_tokens)  # row, layer, KV head, slot
        self._keys, self._values = keys.new_zeros(*slots, dim), values.new_zeros(*slots, dim)
        # Original positions; NOT_KEPT where a slot holds nothing, which no token may see.
        self._positions = torch.full(slots, NOT_KEPT, device=keys.device)
        for row, indices in enumerate(kept):  # rows are ragged; within one, all heads move at once
            num_kept = indices.shape[1]
            kept_slots = slice(self.num_past_tokens - num_kept, self.num_past_tokens)
            gathered = indices.to(keys.device).clamp_min(0)[..., None].expand(-1, -1, dim)
            self._keys[row, :, :, kept_slots] = keys.gather(1, gathered).view(*by_layer, num_kept, dim)
            self._values[row, :, :, kept_slots] = values.gather(1, gathered).view(*by_layer, num_kept, dim)
            self._positions[row, :, :, kept_slots] = indices.reshape(*by_layer, num_kept)
        self._is_ragged = any(bool((row == NOT_KEPT).any()) for row in kept)
        self._blocks: list[_Block] = []  # during a pass, unless heads hold different numbers
        self._num_queries = num_queries
        self._queries: dict[int, Tensor] = {}  # of each layer, as many as were seen, at most `num_queries`
        self._scaling = LogitScale(factor=1.0)
        self.num_positions = 0

    @classmethod
    def joined(cls, caches: Sequence["CompactedCache"], *, num_new_tokens: int) -> "CompactedCache":
        """Put the rows of several caches of one model into new storage, side by side.

        Args:
            caches: They remember no queries, which would not line up, and share nothing with the new one.
            num_new_tokens: Tokens for which room is made.
        """
        assert not any(cache._num_queries for cache in caches), "queries of the newest tokens do not line up"
        joined = copy.copy(caches[0])
        joined.num_past_tokens = max(cache.num_past_tokens for cache in caches)
        joined._is_ragged = any(cache._is_ragged for cache in caches)
        joined._store(caches, num_new_tokens)
        return joined

    @classmethod
    def empty(
        cls,
        model: LanguageModel,
        dtype: torch.dtype,
        *,
        num_rows: int = 1,
        num_new_tokens: int = 0,
        num_queries: int = 0,
    ) -> "CompactedCache":
        """Caches of a model that hold nothing yet."""
        num_heads, num_kv_heads = model.spec.num_heads, model.spec.num_kv_heads
        nothing = torch.zeros(num_heads, 0, model.spec.head_dim, dtype=dtype, device=model.device)
        kept = [torch.zeros(num_heads, 0, dtype=torch.long)] * num_rows
        rooms = {"num_new_tokens": num_new_tokens, "num_queries": num_queries}
        return cls(nothing, nothing, kept, num_kv_heads=num_kv_heads, **rooms)

    def _store(self, caches: Sequence["CompactedCache"], num_new_tokens: int) -> None:
        """Copy the rows of some caches into new storage, each at the right end of the past, and leave room."""
        for name, nothing in (("_keys", 0), ("_values", 0), ("_positions", NOT_KEPT)):
            parts = [getattr(cache, name)[:, :, :, : cache.num_past_tokens] for cache in caches]
            _, num_layers, num_kv_heads, _, *dim = parts[0].shape
            shape = (sum(map(len, parts)), num_layers, num_kv_heads, self.num_past_tokens + num_new_tokens, *dim)
            new = parts[0].new_full(shape, nothing)
            for entries, part in zip(new.split([len(part) for part in parts]), parts, strict=True):
                entries[:, :, :, self.num_past_tokens - part.shape[3] : self.num_past_tokens] = part
            setattr(self, name, new)

    @property
    def num_rows(self) -> int:
        """Caches in the batch."""
        return int(self._keys.shape[0])

    @property
    def num_slots(self) -> int:
        """Slots of every head, room for new tokens included."""
        return int(self._positions.shape[3])

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
        """Run new tokens on the cache, append their entries, and return the logits after the last of them.

        Raises:
            InputError: If a position is beyond what the model was made for, or what it computes is not finite.
        """
        with self.appending(positions, group_size=model.spec.group_size), attention_session(self):
            logits = model.logits(token_ids, positions, num_logits)
            new = slice(self.num_past_tokens, self.num_past_tokens + token_ids.shape[1])
            require_finite_entries(self._keys[..., new, :], self._values[..., new, :])
        return logits

    @contextmanager
    def appending(self, positions: Int[Tensor, "row token"], *, group_size: int) -> Iterator[None]:
        """Expect the new entries of all layers from one pass; they are appended if it ends without an error.

        Args:
            positions: Positions of the new tokens.
            group_size: Query heads that share a KV head.
        """
        end = self.num_past_tokens + positions.shape[1]
        self._positions[..., self.num_past_tokens : end] = positions.to(self._positions.device)[:, None, None]
        self.num_positions = int(positions.max()) + 1
        if not self._is_ragged and self.num_past_tokens:
            self._blocks = list(self._make_blocks(end, group_size))
        try:
            yield
        finally:
            self._blocks = []
        self.num_past_tokens = end

    def state(self, row: int, *, seed: int = 0, rotary: Rotary | None = None) -> CacheState:
        """The input of a method that ranks the entries of one row again, as views.

        Args:
            row: The row, whose heads must have equally many entries.
            seed: Seed of the random method.
            rotary: The model's rotary embedding, for methods that need it.
        """
        assert not self._is_ragged, "heads that hold different numbers of entries cannot be ranked together"
        held = slice(self._first_held(row), self.num_past_tokens)
        queries = [
            self._queries[layer][row] if self._num_queries else self._keys[row, layer, :, None, :0]
            for layer in range(self._keys.shape[1])
        ]
        return CacheState(
            keys=self._keys[row, :, :, held].flatten(0, 1),
            values=self._values[row, :, :, held].flatten(0, 1),
            queries=torch.cat(queries)[:, :, -self.num_held(row) :],
            positions=self._positions[row, :, :, held].flatten(0, 1),
            num_kv_heads=self._keys.shape[2],
            scaling=self._scaling,
            seed=seed,
            rotary=rotary,
        )

    def num_held(self, row: int) -> int:
        """Entries that each head of a row has."""
        return self.num_past_tokens - self._first_held(row)

    def _first_held(self, row: int) -> int:
        return int((self._positions[row, 0, 0, : self.num_past_tokens] == NOT_KEPT).sum())

    def compact(self, kept: Sequence[Int[Tensor, "head _"]]) -> None:
        """Evict in place all but some entries of each row; queries stay.

        Args:
            kept: For each row, indices into the entries that `state` gives, ascending.
        """
        num_rows, num_layers, num_kv_heads, _, dim = self._keys.shape
        most = max(row.shape[1] for row in kept)
        slots = torch.full((num_rows, num_layers * num_kv_heads, most), NOT_KEPT, device=self._keys.device)
        for row, indices in enumerate(kept):
            slots[row, :, most - indices.shape[1] :] = indices.to(slots.device) + self._first_held(row)
        slots = slots.view(num_rows, num_layers, num_kv_heads, most)
        for layer in range(num_layers):  # so that no second copy of the whole is needed
            gathered, is_empty = slots[:, layer].clamp_min(0), slots[:, layer] == NOT_KEPT
            for part in (self._keys[:, layer], self._values[:, layer]):
                part[:, :, :most] = part.gather(2, gathered[..., None].expand(-1, -1, -1, dim))
            positions = self._positions[:, layer].gather(2, gathered)
            self._positions[:, layer, :, :most] = positions.masked_fill_(is_empty, NOT_KEPT)
        self.num_past_tokens = most

    def resize(self, num_new_tokens: int) -> None:
        """Move to storage that has room for so many new tokens and no more."""
        if self.num_past_tokens + num_new_tokens != self.num_slots:
            self._store([self], num_new_tokens)

    def crop(self, num_tokens: int) -> None:
        """Forget the newest entries and their queries, so that `num_tokens` slots remain."""
        forgotten = self.num_past_tokens - num_tokens
        self._queries = {layer: part[..., : part.shape[3] - forgotten, :] for layer, part in self._queries.items()}
        self.num_past_tokens = num_tokens

    def forget_queries(self) -> None:
        """Remember no queries from here on: the cache is not ranked again by them."""
        self._num_queries, self._queries = 0, {}

    def keep_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Forget all other rows."""
        rows = rows.to(self._keys.device)
        self._keys, self._values, self._positions = self._keys[rows], self._values[rows], self._positions[rows]
        self._queries = {layer: part[rows] for layer, part in self._queries.items()}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: LogitScale) -> Tensor:
        """Append the layer's new entries and attend to everything that each token may see, in the type of the cache."""
        wanted, query = query.dtype, query.to(self._keys.dtype)
        end = self.num_past_tokens + key.shape[2]
        self._keys[:, layer, :, self.num_past_tokens : end] = key
        self._values[:, layer, :, self.num_past_tokens : end] = value
        self._scaling = scaling
        if self._num_queries:
            self._remember(layer, query)
        keys, values = self._keys[:, layer, :, :end], self._values[:, layer, :, :end]
        if not self.num_past_tokens:
            return attend_causally(query, keys, values, scaling).to(wanted)
        if self._is_ragged:
            group_size = query.shape[1] // key.shape[1]
            is_held = self._positions[:, layer, :, :end] != NOT_KEPT
            mask = self._additive_mask(is_held, key.shape[2], group_size)
            return attend_masked(query, keys, values, scaling, mask=mask).to(wanted)
        outputs = [
            attend_masked(
                query[at.rows], keys[at.rows, :, at.slots], values[at.rows, :, at.slots], scaling, mask=at.mask
            )
            for at in self._blocks
        ]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(wanted)

    def _make_blocks(self, end: int, group_size: int) -> Iterator[_Block]:
        """Neighbouring rows that hold similar numbers of entries, with one mask for all heads of all layers."""
        is_held = self._positions[:, 0, :1, :end] != NOT_KEPT
        sizes = is_held[:, 0].sum(dim=1).tolist()
        first = 0
        for row in range(1, self.num_rows + 1):
            if row < self.num_rows and max(sizes[first : row + 1]) <= _MOST_PADDING * min(sizes[first : row + 1]):
                continue
            rows, slots = slice(first, row), slice(end - max(sizes[first:row]), end)
            mask = self._additive_mask(is_held[rows, :, slots], end - self.num_past_tokens, group_size)
            yield _Block(rows, slots, mask)
            first = row

    def _remember(self, layer: int, query: Float[Tensor, "row query_head token dim"]) -> None:
        rows, _, num_tokens, dim = query.shape
        grouped = query.reshape(rows, self._keys.shape[2], -1, num_tokens, dim)
        earlier = self._queries.get(layer, grouped[:, :, :, :0])
        self._queries[layer] = torch.cat([earlier, grouped], dim=3)[..., -self._num_queries :, :].clone()

    def _additive_mask(
        self, is_held: Bool[Tensor, "row head slot"], num_new_tokens: int, group_size: int
    ) -> Float[Tensor, "row head token_of_group slot"]:
        """Make the mask that SDPA adds to logits; from a Boolean mask it would make this in every layer."""
        slots = torch.arange(is_held.shape[2], device=is_held.device)
        visible = is_held[:, :, None] & (slots <= slots[-num_new_tokens:, None])
        mask = torch.zeros(visible.shape, dtype=self._keys.dtype, device=visible.device)
        return mask.masked_fill_(~visible, -torch.inf).repeat(1, 1, group_size, 1)
