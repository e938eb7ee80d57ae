"""Every contender's ranking of one context, from one prefill of the whole sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.importance import importance
from kvpolicy.attention.prefill import Prefill, prefill
from kvpolicy.attention.probe import run_probe
from kvpolicy.attention.rotary_proof import read_rotary
from kvpolicy.errors import InputError
from kvpolicy.evaluation.results import Contender, RankedContext, TokenRanking
from kvpolicy.methods.base import CacheState, kept_by_method
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.prompts import EncodedSample
from kvpolicy.protocol import Cut
from kvpolicy.ranking import NOT_KEPT, retention_ranks
from kvpolicy.seeds import derive_seed


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranked:
    """A contender's ranking of one context.

    Attributes:
        contender: Whose it is.
        state: What it saw.
        scores: What it made of it.
    """

    contender: Contender
    state: CacheState
    scores: Float[Tensor, "head token"]

    def kept(self, budget: int) -> Int[Tensor, "head most"]:
        """The entries that each head keeps; all of them where the method evicts nothing."""
        if not self.contender.method.evicts:
            return torch.arange(self.state.num_tokens).expand(self.state.num_heads, -1)
        return kept_by_method(self.contender.method, self.state, self.scores, budget)


def prefill_once(
    model: LanguageModel, example: EncodedSample, contenders: Sequence[Contender], cuts: Sequence[Cut]
) -> Prefill:
    """Run context, question and reference answer, with all queries and logits that any contender or cut needs.

    Raises:
        InputError: Naming the sample, if it is too long for the model or what the model computes is not finite.
    """
    needed = [contender.method.num_queries for contender in contenders]
    token_ids = torch.tensor(example.context_ids + example.question_ids + example.answer_ids)
    num_tokens, num_future = len(token_ids), max(cut.num_future for cut in cuts)
    most = num_tokens if None in needed else max((count for count in needed if count is not None), default=0)
    try:
        return prefill(model, token_ids, num_queries=min(num_tokens, most + num_future), num_logits=num_future + 1)
    except InputError as error:
        raise InputError(f"sample {example.sample.sample_id}: {error}") from error


def context_state(whole: Prefill, num_context: int) -> CacheState:
    """The context's part of a prefill, as views."""
    return CacheState(
        keys=whole.keys[:, :num_context],
        values=whole.values[:, :num_context],
        queries=whole.queries_before(num_context, num_context),
        positions=torch.arange(num_context, device=whole.keys.device)[None],
        num_kv_heads=whole.num_kv_heads,
        scaling=whole.scaling,
    )


def rank_context(
    model: LanguageModel, contenders: Sequence[Contender], whole: Prefill, cut: Cut, *, sample_seed: int
) -> list[Ranked]:
    """Let every contender rank the context of one example.

    Args:
        model: The language model.
        contenders: Methods with their seeds.
        whole: From `prefill_once`.
        cut: Where the context ends.
        sample_seed: Seed of this example, which the random method mixes with its own.

    Raises:
        InputError: If a method lacks what it needs.
    """
    n = cut.num_context
    received = importance(whole, num_context=n, num_future=cut.num_future)
    state = replace(context_state(whole, n), importance=received)
    if any(contender.method.needs_rotary for contender in contenders):
        state = replace(state, rotary=read_rotary(model, model.sequence_tokens or whole.num_tokens))
    ranked = []
    for contender in contenders:
        seeded = replace(state, seed=derive_seed(sample_seed, contender.seed))
        if contender.method.probe is not None:
            seeded = replace(seeded, probe=run_probe(model, state.keys, state.values, contender.method.probe))
        ranked.append(Ranked(contender=contender, state=seeded, scores=contender.method.score(seeded)))
    return ranked


def token_rankings(ranked: Sequence[Ranked], setting: str, budgets: Sequence[int]) -> RankedContext:
    """The order of a context's tokens in every ranking, and how many of them each head keeps.

    Args:
        ranked: From `rank_context`; those that evict nothing are left out.
        setting: Which of the example's contexts it is.
        budgets: Entries kept per KV head, in tokens.
    """
    importance = ranked[0].state.importance
    assert importance is not None
    return RankedContext(
        setting=setting,
        importance=importance.cpu(),
        rankings=tuple(
            TokenRanking(
                method=entry.contender.method.name,
                seed=entry.contender.seed,
                ranks=retention_ranks(entry.scores).cpu(),
                kept=torch.stack([(entry.kept(budget) != NOT_KEPT).sum(dim=1) for budget in budgets]).cpu(),
            )
            for entry in ranked
            if entry.contender.method.evicts
        ),
    )
