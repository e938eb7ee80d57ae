"""Contexts of any length in a cache of bounded size: run some tokens, evict down to the budget, run the next ones.

One class serves chunked prefill, streaming (eviction while decoding) and teacher-forced streams, for a batch of rows of
which each has its own method and budget; all rows share the forward passes. At no time does a head have more entries
than its budget and one interval of tokens. Positions stay those of the original sequence, so a stream ends where the
model's positions do.

When a method ranks again it sees the entries that are left, with their original positions, and the queries of the
newest tokens, as many as it asks for. Methods that need more than that say so (`Method.recompression_obstacle`) and are
refused.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.rotary_proof import read_rotary
from kvpolicy.errors import InputError
from kvpolicy.inference.cache import CompactedCache, run_alike
from kvpolicy.methods.base import Method, kept_by_method
from kvpolicy.methods.ranking import NOT_KEPT, check_budget
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.seeds import derive_seed

# Queries that are remembered for a method that asks for all, if an interval has fewer tokens.
_ENOUGH_QUERIES = 128
# Logits of so many tokens are held at once.
_LOGITS_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class StreamedRow:
    """One variant of the stream: a method and a budget.

    Attributes:
        method: Ranks the entries at every eviction.
        budget: Entries that each KV head has after an eviction.
        seed: Seed of the random method, which draws anew at every eviction.
    """

    method: Method
    budget: int
    seed: int = 0


class StreamedCaches:
    """A batch of caches that evict by themselves. It runs and decodes like a `CompactedCache`.

    Attributes:
        num_evictions: Evictions so far.
        num_run_tokens: Tokens that were run so far, of all rows together.
    """

    def __init__(self, model: LanguageModel, rows: Sequence[StreamedRow], *, interval_tokens: int) -> None:
        """Begin with empty caches.

        Args:
            model: The model that will run on them.
            rows: The variants.
            interval_tokens: Tokens between two evictions: the chunk of a prefill, the interval of a stream.

        Raises:
            InputError: If there are no rows, a method cannot rank a compacted cache, a budget is below the always-kept
                tokens or beyond the model's positions, or the interval is not positive.
        """
        if not rows:
            raise InputError("stream: there are no rows, expected at least one method with a budget")
        for row in rows:
            check_recompression(row.method)
            check_budget(row.budget, model.spec.max_positions)
        _check_interval(interval_tokens)
        self._rows = list(rows)
        self._interval_tokens = interval_tokens
        self._num_since = 0
        self.num_evictions = self.num_run_tokens = 0
        self._num_seen = torch.zeros(len(rows), dtype=torch.long)
        needs_rotary = any(row.method.needs_rotary for row in rows)
        self._rotary = read_rotary(model, model.rotary_tokens) if needs_rotary else None
        num_queries = max(_queries_of(row.method, interval_tokens) for row in rows)
        self._cache = CompactedCache.empty(model, model.dtype, num_rows=len(rows), num_queries=num_queries)

    @classmethod
    def joined(cls, streams: Sequence["StreamedCaches"], *, interval_tokens: int) -> "StreamedCaches":
        """Evict from several streams, and go on with the rows of all of them as one batch.

        Args:
            streams: Streams of one model that may have seen different numbers of tokens; they are used up. Their
                methods need no queries.
            interval_tokens: Tokens between two evictions from here on.

        Raises:
            InputError: If the interval is not positive.
        """
        _check_interval(interval_tokens)
        joined = copy.copy(streams[0])
        joined._cache = CompactedCache.joined([stream.finish(0) for stream in streams], num_new_tokens=interval_tokens)
        joined._rows = [row for stream in streams for row in stream._rows]
        joined._num_seen = torch.cat([stream._num_seen for stream in streams])
        joined._interval_tokens, joined._num_since = interval_tokens, 0
        joined.num_evictions, joined.num_run_tokens = max(stream.num_evictions for stream in streams), 0
        return joined

    @property
    def num_rows(self) -> int:
        """Caches in the batch."""
        return self._cache.num_rows

    @property
    def num_seen_tokens(self) -> int:
        """Tokens of the stream so far; of the longest one, where several were joined."""
        return int(self._num_seen.max())

    @property
    def num_slots(self) -> int:
        """Slots of every head: never more than the largest budget and one interval."""
        return self._cache.num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes that keys and values occupy, room for new tokens included."""
        return self._cache.num_bytes

    def num_held(self, row: int) -> int:
        """Entries that each head of a row has."""
        return self._cache.num_held(row)

    def positions(self, row: int) -> Int[Tensor, "head token"]:
        """Original positions of the entries of a row."""
        return self._cache.state(row).positions.clone()

    def run(
        self,
        model: LanguageModel,
        token_ids: Int[Tensor, "row token"],
        positions: Int[Tensor, "row token"],
        num_logits: int,
    ) -> Float[Tensor, "row logit vocab"]:
        """Run the next tokens of the stream, evicting after every interval, and return the logits of the last ones.

        Args:
            model: The model.
            token_ids: New tokens of each row; any number of them.
            positions: Their positions, which follow those of the tokens before.
            num_logits: After how many of the last tokens to return next-token logits.

        Raises:
            InputError: If the positions do not follow, or are beyond the model's.
        """
        num_tokens = token_ids.shape[1]
        expected = (self._num_seen[:, None] + torch.arange(num_tokens)).to(positions.device)
        if wrong := (positions != expected).any(dim=1).nonzero().flatten().tolist():
            given, right = positions[wrong[0]].tolist(), expected[wrong[0]].tolist()
            raise InputError(
                f"stream: positions from {given[0]} to {given[-1]}, expected {right[0]} to {right[-1]}; "
                "a stream has no gaps"
            )
        self.num_run_tokens += token_ids.numel()
        logits: list[Tensor] = []
        start = 0
        while start < num_tokens:
            room = self._interval_tokens - self._num_since
            if self._cache.num_slots < self._cache.num_past_tokens + room:
                self._cache.resize(room)
            end = min(start + room, num_tokens)
            wanted = max(0, end - max(start, num_tokens - num_logits))
            logits.append(self._cache.run(model, token_ids[:, start:end], positions[:, start:end], wanted))
            self._num_since += end - start
            self._num_seen = self._num_seen + (end - start)
            if self._num_since == self._interval_tokens:
                self.evict()
            start = end
        return torch.cat(logits, dim=1)

    def evict(self) -> None:
        """Compact each row to its budget now, and count the interval from here."""
        if self._num_since:
            self._cache.compact([self._kept(index) for index in range(self.num_rows)])
            self._num_since = 0
            self.num_evictions += 1

    def evict_every(self, num_tokens: int) -> None:
        """Evict now and from here on after so many tokens: to decode with another interval than that of the prefill.

        Raises:
            InputError: If the interval is not positive.
        """
        _check_interval(num_tokens)
        self.evict()
        self._interval_tokens = num_tokens
        self._cache.resize(num_tokens)

    def finish(self, num_new_tokens: int) -> CompactedCache:
        """Evict now, and hand over caches with room for tokens after which nothing is evicted, so without queries."""
        self.evict()
        self._cache.resize(num_new_tokens)
        self._cache.forget_queries()
        return self._cache

    def keep_rows(self, rows: Int[Tensor, "kept"]) -> None:
        """Forget all other rows."""
        self._cache.keep_rows(rows)
        self._rows = [self._rows[index] for index in rows.tolist()]
        self._num_seen = self._num_seen[rows.cpu()]

    def _kept(self, index: int) -> Int[Tensor, "head _"]:
        row = self._rows[index]
        state = self._cache.state(index, seed=derive_seed(row.seed, self.num_evictions), rotary=self._rotary)
        if state.num_tokens <= row.budget:
            return torch.arange(state.num_tokens, device=state.keys.device).expand(state.num_heads, -1)
        kept = kept_by_method(row.method, state, row.method.score(state), row.budget)
        if bool((kept == NOT_KEPT).any()):
            raise InputError(
                f"method {row.method.name}: heads that keep different numbers of tokens cannot be ranked again: "
                "compress once, after the whole context, or choose another method"
            )
        return kept


def check_recompression(method: Method) -> None:
    """Refuse a method for chunked prefill and streaming that can only rank a whole context.

    Raises:
        InputError: With the method's reason.
    """
    if method.recompression_obstacle is not None:
        raise InputError(
            f"method {method.name} ranks whole contexts only, as {method.recompression_obstacle}: compress once, after "
            "the whole context, or choose another method"
        )


def token_losses(
    model: LanguageModel, caches: StreamedCaches, token_ids: Int[Tensor, "token"]
) -> Float[Tensor, "row token-1"]:
    """Teacher-forced stream over a text: the negative log-likelihood of every token but the first, in nats.

    Memory does not grow with the text. The exponential of a row's mean is the perplexity of the text in a cache of that
    row's budget.

    Args:
        model: The model.
        caches: Where the text follows what they have seen.
        token_ids: The text.

    Raises:
        InputError: If the text has fewer than two tokens, or more than the model has positions.
    """
    num_tokens = token_ids.shape[0]
    if num_tokens < 2:
        raise InputError(f"stream: a text of {num_tokens} tokens has none to predict, expected at least two")
    losses = []
    for start in range(0, num_tokens - 1, _LOGITS_TOKENS):
        following = token_ids[start + 1 : start + 1 + _LOGITS_TOKENS].to(model.device)
        tokens = token_ids[start : start + len(following)]
        logits = run_alike(model, caches, tokens, first_position=caches.num_seen_tokens).float()
        losses.append(logits.logsumexp(dim=-1) - logits[:, torch.arange(len(following)), following])
    return torch.cat(losses, dim=1)


def _queries_of(method: Method, interval_tokens: int) -> int:
    return max(interval_tokens, _ENOUGH_QUERIES) if method.num_queries is None else method.num_queries


def _check_interval(num_tokens: int) -> None:
    if num_tokens < 1:
        raise InputError(f"stream: an interval of {num_tokens} tokens, expected at least 1 between two evictions")
