"""The interface of eviction methods: their input, and the scores that they return.

A method scores, and may share a budget among heads: kvpolicy.methods.ranking selects and kvpolicy.inference.cache
compacts. Methods hold their parameters and nothing else; nothing stays behind on a model or between two calls.

Legend: head = KV heads of the whole model, layer-major; group = query heads that share a KV head; token = cached
tokens; query = the last tokens of the context whose queries are known; probe = embeddings of a method's own that were
run on top of the context; dim = head dimension.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.probe import ProbeStates
from kvpolicy.config.settings import Settings
from kvpolicy.errors import InputError
from kvpolicy.methods.ranking import check_allocation, check_budget, kept_positions
from kvpolicy.models.rotary import Rotary

Scores = Float[Tensor, "head token"]
"""One score for each token of each head."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheState:
    """The cache of one sample at the moment of compression, with what scoring it may need.

    Attributes:
        keys: Keys with their rotary positions applied.
        values: Values.
        queries: Queries of the last `query` tokens of the context, with their rotary positions applied. As many as the
            method asks for, or more; all of them when `query` equals `token`. After a compression these tokens need not
            be cached any more, but for the very last one.
        positions: Original position of every cached token, ascending: one row while nothing was evicted, one for each
            head after a compression.
        num_kv_heads: KV heads of one layer: head h belongs to layer h // num_kv_heads.
        scaling: The model's factor on query-key products, and its cap.
        seed: Seed of this sample; only the random method uses it.
        importance: True attention mass that each token receives from the future; only the oracle uses it.
        rotary: The rotary embedding of keys and queries (`kvpolicy.attention.rotary_proof`); only methods
            that say so need it.
        probe: The results of the method's own `probe` on top of this cache (`kvpolicy.attention.probe.run_probe`).
    """

    keys: Float[Tensor, "head token dim"]
    values: Float[Tensor, "head token dim"]
    queries: Float[Tensor, "head group query dim"]
    positions: Int[Tensor, "shared token"]
    num_kv_heads: int
    scaling: LogitScale
    seed: int = 0
    importance: Float[Tensor, "head token"] | None = None
    rotary: Rotary | None = None
    probe: ProbeStates | None = None

    def __post_init__(self) -> None:
        """Check that the tensors describe one cache.

        Raises:
            InputError: If their shapes disagree, or the heads do not divide into layers.
        """
        num_heads, num_tokens, head_dim = self.keys.shape
        group = self.queries.shape[1] if self.queries.ndim == 4 else None
        of_probe = None if self.probe is None else self.probe.queries
        expected: list[tuple[str, Tensor | None, tuple[int | str | None, ...]]] = [
            ("values have", self.values, (num_heads, num_tokens, head_dim)),
            ("queries have", self.queries, (num_heads, group or "group", "query", head_dim)),
            ("positions have", self.positions, (num_heads if len(self.positions) == num_heads else 1, num_tokens)),
            ("importance has", self.importance, (num_heads, num_tokens)),
            ("queries of the probe have", of_probe, (num_heads, group, "probe", head_dim)),
        ]
        for name, tensor, shape in expected:
            if tensor is not None and not _fits(tuple(tensor.shape), shape):
                raise InputError(
                    f"cache state: {name} shape {tuple(tensor.shape)}, expected ({', '.join(map(str, shape))}) as keys "
                    f"have shape {tuple(self.keys.shape)}"
                )
        if self.num_queries > num_tokens:
            raise InputError(
                f"cache state: {self.num_queries} queries for {num_tokens} tokens, expected at most one each"
            )
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise InputError(
                f"cache state: {num_heads} heads do not divide into layers of num_kv_heads = {self.num_kv_heads}"
            )

    @property
    def num_heads(self) -> int:
        """KV heads of the whole model."""
        return self.keys.shape[0]

    @property
    def num_tokens(self) -> int:
        """Cached tokens."""
        return self.keys.shape[1]

    @property
    def num_queries(self) -> int:
        """Last tokens whose queries are here."""
        return self.queries.shape[2]

    @property
    def query_positions(self) -> Int[Tensor, "1 query"]:
        """Original positions of the queries, which are those of consecutive tokens up to the last cached one."""
        return self.positions[:1, -1:] - torch.arange(self.num_queries - 1, -1, -1, device=self.positions.device)

    def last_queries(self, count: int, *, method: str) -> Float[Tensor, "head group last dim"]:
        """The queries of the last tokens of the context.

        Args:
            count: How many; fewer come back where the context is shorter.
            method: Name of the method, for the error.

        Raises:
            InputError: If the context is long enough but its queries were not recorded.
        """
        wanted = min(count, self.num_tokens)
        if wanted > self.num_queries:
            raise InputError(
                f"method {method}: {self.num_queries} queries recorded, expected the last {wanted} of the context; "
                "record as many as the method's num_queries says"
            )
        return self.queries[:, :, self.num_queries - wanted :]


def _fits(actual: tuple[int, ...], expected: tuple[int | str | None, ...]) -> bool:
    """Whether a shape is as expected, where names stand for any size."""
    return len(actual) == len(expected) and all(
        isinstance(size, str) or size == given for given, size in zip(actual, expected, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Method(Settings, ABC):
    """Something that scores cached tokens; its fields are its parameters, checked as their annotations say.

    Attributes:
        name: In data and on the command line.
        description: One line for people.
        reference: Where the method is defined.
        recompression_obstacle: Why the method cannot rank a cache that it compacted before, in one line; None where it
            can, as chunked prefill and streaming ask of it.
        evicts: False only for the method that keeps everything.
        needs_importance: True only for the oracle.
        needs_rotary: True for methods that turn queries back from their positions.
        trained: Kind of artifact that a method is made from: `policy_set`, `soft_tokens`, or none.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    reference: ClassVar[str]
    recompression_obstacle: ClassVar[str | None] = None
    evicts: ClassVar[bool] = True
    needs_importance: ClassVar[bool] = False
    needs_rotary: ClassVar[bool] = False
    trained: ClassVar[Literal["", "policy_set", "soft_tokens"]] = ""

    @property
    def num_queries(self) -> int | None:
        """Last queries of the context that scoring needs: 0 for none, None for all."""
        return 0

    @property
    def probe(self) -> Float[Tensor, "probe width"] | None:
        """Embeddings that are to be run on top of the full cache before scoring; None for most methods."""
        return None

    @abstractmethod
    def score(self, state: CacheState) -> Scores:
        """Score every cached token of every head; the higher, the longer it is kept.

        Args:
            state: The cache of one sample.

        Returns:
            Finite scores in float32. Only their order within a head matters.

        Raises:
            InputError: If the state lacks what the method needs.
        """

    def allocate(self, state: CacheState, scores: Scores, budget: int) -> int | Int[Tensor, "head"]:
        """Share a budget of `budget` tokens a KV head on average among the heads; by default all get the same.

        Args:
            state: The cache that was scored.
            scores: The scores of it.
            budget: Tokens that a head keeps on average.

        Returns:
            The budget of all heads, or one for each. `kvpolicy.methods.ranking.check_allocation` says what is allowed:
            the sum is `budget` times the number of heads, and each head keeps at least the always-kept tokens and at
            most the context.
        """
        return budget


def kept_by_method(method: Method, state: CacheState, scores: Scores, budget: int) -> Int[Tensor, "head most"]:
    """Choose the tokens that each head keeps, when the method shares a budget among the heads.

    Args:
        method: The method that gave the scores.
        state: The cache that was scored.
        scores: Higher is kept longer.
        budget: Tokens that a head keeps on average.

    Returns:
        As `kvpolicy.methods.ranking.kept_positions`.

    Raises:
        InputError: If the budget or what the method makes of it cannot be kept, or if a score is NaN.
    """
    check_budget(budget, state.num_tokens)
    allocation = method.allocate(state, scores, budget)
    check_allocation(allocation, budget, num_heads=state.num_heads, num_tokens=state.num_tokens)
    return kept_positions(scores, allocation)
