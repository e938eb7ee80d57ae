"""Does the reward survive eviction? What future tokens attend to on the compacted cache, and on the full one.

Policies are trained on importance that was computed on the full cache. Once entries are gone, the future's queries are
others and what is left shares all of the attention; here importance is computed again, on what was kept:

    imp'(i) = sum over future tokens j of max over query heads g in the group of softmax_i(scaling * q'_j^g . k_i)

with the queries of the pass on the compacted cache and the softmax over its kept entries and the new ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.analysis.ranks import spearman
from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.prefill import Prefill
from kvpolicy.attention.weights import attention_blocks
from kvpolicy.inference.cache import CompactedCache, run_alike
from kvpolicy.methods.ranking import NOT_KEPT
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.objectives.cost import TINY


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardSurvival:
    """How the reward of one example fared under one eviction.

    Attributes:
        correlation: Spearman's, over the entries that a head kept, of their importance recomputed on the compacted
            cache with that on the full one; NaN for a head that has no order of them.
        missed_mass: Share of a head's importance on the full cache that went to evicted entries.
    """

    correlation: Float[Tensor, "head"]
    missed_mass: Float[Tensor, "head"]

    @property
    def mean_correlation(self) -> float | None:
        """The metric `reward_correlation`: the mean over the heads that have one; None where none has."""
        defined = self.correlation[~self.correlation.isnan()]
        return float(defined.mean()) if len(defined) else None

    @property
    def mean_missed_mass(self) -> float:
        """The metric `missed_mass`: the mean over heads."""
        return float(self.missed_mass.mean())


class ObservedCache(CompactedCache):
    """A compacted cache that adds up what its entries receive from the first pass that runs on it.

    It can take the place of any compacted cache. Later passes, such as the decoding of an answer, are not observed.

    Attributes:
        importance: For each row, the recomputed importance of every kept entry, in float32; 0 where nothing is kept.
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
        """Gather the kept entries, as `CompactedCache` does; `keys` must not change until the first pass ends."""
        super().__init__(keys, values, kept, num_kv_heads=num_kv_heads, num_new_tokens=num_new_tokens)
        self._context_keys = keys
        self._kept = [indices.to(keys.device) for indices in kept]
        self._unobserved = set(range(keys.shape[0] // num_kv_heads))
        self.importance = [torch.zeros(indices.shape, device=keys.device) for indices in kept]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: LogitScale) -> Tensor:
        """Attend as a compacted cache does, and in the first pass note what the kept entries receive."""
        if layer in self._unobserved:
            assert query.shape[0] == len(self._kept), "the first pass must run on all rows"
            self._unobserved.discard(layer)
            heads = slice(layer * key.shape[1], (layer + 1) * key.shape[1])
            for row, kept in enumerate(self._kept):  # a row at a time, for memory
                self.importance[row][heads] = received_importance(
                    query[row].view(key.shape[1], -1, *query.shape[2:]),
                    self._context_keys[heads],
                    key[row],
                    kept[heads],
                    scaling=scaling,
                )
        return super().attend(layer, query, key, value, scaling)


def received_importance(
    queries: Float[Tensor, "head group new dim"],
    keys: Float[Tensor, "head token dim"],
    new_keys: Float[Tensor, "head new dim"],
    kept: Int[Tensor, "head kept"],
    *,
    scaling: LogitScale,
) -> Float[Tensor, "head kept"]:
    """Attention that kept entries receive from new tokens, which see them and each other, in blocks of queries.

    Args:
        queries: Post-RoPE queries of the new tokens.
        keys: Post-RoPE keys of the uncompacted context.
        new_keys: Post-RoPE keys of the new tokens.
        kept: Indices that each head kept, with NOT_KEPT on the left of heads that kept fewer.
        scaling: The model's factor on the products of queries and keys, and its cap.

    Returns:
        float32; 0 where nothing is kept.
    """
    num_kept = kept.shape[1]
    # Where a head kept fewer, its last entry stands in: its copies are never seen, and no softmax is without them.
    is_held, indices = kept != NOT_KEPT, torch.where(kept == NOT_KEPT, kept[:, -1:], kept)
    gathered = keys.gather(1, indices[..., None].expand(-1, -1, keys.shape[2]))
    received = torch.zeros(kept.shape, device=keys.device)
    for heads, weights in attention_blocks(queries, torch.cat((gathered, new_keys), dim=1), scaling=scaling):
        past = weights[..., :num_kept]
        copies = (past * ~is_held[heads, None, None]).sum(dim=-1, keepdim=True)
        received[heads] += (past / (1 - copies)).amax(dim=1).sum(dim=1)
    return received * is_held


def recompute_importance(
    model: LanguageModel,
    whole: Prefill,
    kept: Sequence[Int[Tensor, "head _"]],
    future_ids: Int[Tensor, "future"],
    *,
    num_context: int,
) -> list[Float[Tensor, "head _"]]:
    """Run the future on compacted caches and return what their entries receive from it.

    Its like on the full cache is `importance(whole, num_context=num_context, num_future=len(future_ids))`.

    Args:
        model: The language model.
        whole: The prefill of the context, and of any tokens that follow it.
        kept: For each row, the kept indices of every head, as in `CompactedCache`.
        future_ids: Tokens that follow the context.
        num_context: Tokens of the context.

    Returns:
        For each row, the importance of its kept entries.
    """
    cache = ObservedCache(
        whole.keys[:, :num_context],
        whole.values[:, :num_context],
        kept,
        num_kv_heads=whole.num_kv_heads,
        num_new_tokens=len(future_ids),
    )
    run_alike(model, cache, future_ids, first_position=num_context, num_logits=1)
    return cache.importance


def reward_survival(
    full: Float[Tensor, "head token"], recomputed: Float[Tensor, "head kept"], kept: Int[Tensor, "head kept"]
) -> RewardSurvival:
    """Compare importance on the full cache with that on a compacted one.

    Args:
        full: Importance of every entry on the full cache.
        recomputed: Importance of the kept entries on the compacted cache.
        kept: Their indices, with NOT_KEPT on the left of heads that kept fewer.
    """
    kept = kept.to(full.device)
    before = full.gather(1, kept.clamp_min(0))
    return RewardSurvival(
        correlation=spearman(before, recomputed.to(full.device), mask=kept != NOT_KEPT),
        missed_mass=missed_mass(full, kept),
    )


def missed_mass(importance: Float[Tensor, "head token"], kept: Int[Tensor, "head kept"]) -> Float[Tensor, "head"]:
    """Share of each head's importance that goes to entries it does not keep; 0 for a head that receives nothing."""
    kept = kept.to(importance.device)
    wide = importance.double()
    evicted = torch.ones_like(wide)
    evicted.scatter_reduce_(1, kept.clamp_min(0), (kept == NOT_KEPT).double(), reduce="amin")
    total = wide.sum(dim=1)
    return torch.where(total > TINY, (wide * evicted).sum(dim=1) / total.clamp_min(TINY), 0.0).float()
