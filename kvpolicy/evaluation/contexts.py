"""The contexts of one example, one a setting, prepared from one prefill of the whole sequence; and ranking them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.importance import importance
from kvpolicy.attention.prefill import Prefill, prefill
from kvpolicy.attention.probe import run_probe
from kvpolicy.attention.rotary_proof import read_rotary
from kvpolicy.errors import InputError
from kvpolicy.evaluation.results import Contender, TokenRanking
from kvpolicy.methods.base import CacheState, kept_by_method
from kvpolicy.methods.ranking import NOT_KEPT, retention_ranks
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.seeds import derive_seed
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import Cut, cut_sample


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedContext:
    """The context of one example in one setting, ready to be ranked, and what comes after it.

    Attributes:
        model: The language model, as the example's length needs it.
        example: The example.
        cut: Where its context ends.
        whole: The prefill of context, question and reference answer, whose logits begin after the last token of the
            context or earlier.
        state: The context's part of the prefill, with true importance.
        seed: Seed of the example.
        answer_tokens: Tokens of a greedy answer, at most; 0 for none.
    """

    model: LanguageModel
    example: EncodedSample
    cut: Cut
    whole: Prefill
    state: CacheState
    seed: int
    answer_tokens: int

    @property
    def importance(self) -> Float[Tensor, "head token"]:
        """True importance of every entry."""
        assert self.state.importance is not None
        return self.state.importance

    @property
    def context_ids(self) -> Int[Tensor, "context"]:
        """The tokens that are ranked and compressed."""
        return _token_ids(self.example)[: self.cut.num_context]

    @property
    def future_ids(self) -> Int[Tensor, "future"]:
        """Question and reference answer."""
        return _token_ids(self.example)[self.cut.num_context :]

    @property
    def num_following_tokens(self) -> int:
        """Tokens that run on the compacted context, at most: the question, and the longest of all that follow it."""
        return self.cut.num_question + _longest_end(self.example, self.answer_tokens)

    @property
    def full_logits(self) -> Float[Tensor, "prediction vocab"]:
        """Predictions of the full cache after the context's last token and after each token of the future."""
        return self.whole.logits[-self.cut.num_future - 1 :]

    def rank(self, contender: Contender) -> "Ranked":
        """Let a contender rank the context.

        Raises:
            InputError: If the method lacks what it needs.
        """
        method = contender.method
        state = replace(self.state, seed=derive_seed(self.seed, contender.seed))
        if method.probe is not None:
            state = replace(state, probe=run_probe(self.model, state.keys, state.values, method.probe))
        return Ranked(context=self, contender=contender, state=state, scores=method.score(state))


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranked:
    """A contender's ranking of one context.

    Attributes:
        context: The context.
        contender: The contender.
        state: The cache as its method saw it.
        scores: The method's scores.
    """

    context: PreparedContext
    contender: Contender
    state: CacheState
    scores: Float[Tensor, "head token"]

    @property
    def source(self) -> dict[str, Any]:
        """The fields that say whose figures these are, and in which setting."""
        contender = self.contender
        return {"setting": self.context.cut.setting, "method": contender.method.name, "seed": contender.seed}

    def kept(self, budget: int) -> Int[Tensor, "head most"]:
        """The entries that each head keeps; all of them where the method evicts nothing."""
        if not self.contender.method.evicts:
            return torch.arange(self.state.num_tokens).expand(self.state.num_heads, -1)
        return kept_by_method(self.contender.method, self.state, self.scores, budget)

    def by_token(self, budgets: Sequence[int]) -> TokenRanking:
        """The order of the context's tokens, and how many of them each head keeps at each budget."""
        return TokenRanking(
            **self.source,
            importance=self.context.importance.cpu(),
            ranks=retention_ranks(self.scores).cpu(),
            kept=torch.stack([(self.kept(budget) != NOT_KEPT).sum(dim=1) for budget in budgets]).cpu(),
        )


def prepare_contexts(
    model: LanguageModel,
    example: EncodedSample,
    contenders: Sequence[Contender],
    *,
    settings: Sequence[str],
    seed: int,
    answer_tokens: int = 0,
) -> list[PreparedContext]:
    """Run context, question and reference answer once, and prepare the context of each setting.

    Args:
        model: The language model.
        example: The example, encoded.
        contenders: Methods, which say what of the prefill they need.
        settings: `query_agnostic`, `query_aware` or both.
        seed: Seed of the example.
        answer_tokens: Tokens of a greedy answer, at most; 0 for none.

    Raises:
        InputError: Naming the sample, if it is too long for the model or what the model computes is not finite.
    """
    cuts = [cut_sample(example, setting) for setting in settings]
    num_prompt = len(example.context_ids) + len(example.question_ids)
    model = model.for_answer(num_prompt, _longest_end(example, answer_tokens), sample_id=example.sample.sample_id)
    methods = [contender.method for contender in contenders]
    token_ids = _token_ids(example)
    num_future = max(cut.num_future for cut in cuts)
    # All queries and logits that any method or cut needs.
    needed = [len(token_ids) if method.num_queries is None else method.num_queries for method in methods]
    num_queries = min(len(token_ids), max(needed, default=0) + num_future)
    try:
        whole = prefill(model, token_ids, num_queries=num_queries, num_logits=num_future + 1)
    except InputError as error:
        raise InputError(f"sample {example.sample.sample_id}: {error}") from error
    needs_rotary = any(method.needs_rotary for method in methods)
    rotary = read_rotary(model, model.sequence_tokens or whole.num_tokens) if needs_rotary else None
    return [
        PreparedContext(
            model=model,
            example=example,
            cut=cut,
            whole=whole,
            state=replace(
                context_state(whole, cut.num_context),
                importance=importance(whole, num_context=cut.num_context, num_future=cut.num_future),
                rotary=rotary,
            ),
            seed=seed,
            answer_tokens=answer_tokens,
        )
        for cut in cuts
    ]


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


def _token_ids(example: EncodedSample) -> Int[Tensor, "token"]:
    return torch.tensor(example.context_ids + example.question_ids + example.answer_ids)


def _longest_end(example: EncodedSample, answer_tokens: int) -> int:
    """Tokens that run after the question, at most: of the reference, of a greedy answer or of an option."""
    return max(len(example.answer_ids), answer_tokens, *map(len, example.option_ids))
