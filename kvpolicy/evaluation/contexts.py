"""The contexts of one example, one a setting, prepared from one prefill of the whole sequence; and ranking them."""

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
from kvpolicy.evaluation.continuation import Continuation
from kvpolicy.evaluation.results import Contender, TokenRanking
from kvpolicy.methods.base import CacheState, Method, kept_by_method
from kvpolicy.methods.ranking import NOT_KEPT, retention_ranks
from kvpolicy.models.language_model import LanguageModel
from kvpolicy.seeds import derive_seed
from kvpolicy.text.encoded_sample import EncodedSample
from kvpolicy.text.protocol import Cut, cut_sample


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

    def by_token(self, setting: str, budgets: Sequence[int]) -> TokenRanking:
        """The order of the context's tokens, and how many of them each head keeps at each budget."""
        assert self.state.importance is not None
        return TokenRanking(
            setting=setting,
            importance=self.state.importance.cpu(),
            method=self.contender.method.name,
            seed=self.contender.seed,
            ranks=retention_ranks(self.scores).cpu(),
            kept=torch.stack([(self.kept(budget) != NOT_KEPT).sum(dim=1) for budget in budgets]).cpu(),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedContext:
    """The context of one example in one setting, ready to be ranked.

    Attributes:
        model: The language model, as the example's length needs it.
        continuation: The example with its prefill, and what comes after the context.
        state: The context's part of the prefill, with true importance.
        seed: Of the example.
    """

    model: LanguageModel
    continuation: Continuation
    state: CacheState
    seed: int

    @property
    def setting(self) -> str:
        """The setting that the context was cut for."""
        return self.continuation.cut.setting

    @property
    def importance(self) -> Float[Tensor, "head token"]:
        """True importance of every entry."""
        assert self.state.importance is not None
        return self.state.importance

    def rank(self, contender: Contender) -> Ranked:
        """Let a contender rank the context.

        Raises:
            InputError: If the method lacks what it needs.
        """
        method = contender.method
        state = replace(self.state, seed=derive_seed(self.seed, contender.seed))
        if method.probe is not None:
            state = replace(state, probe=run_probe(self.model, state.keys, state.values, method.probe))
        return Ranked(contender=contender, state=state, scores=method.score(state))


def prepare_contexts(
    model: LanguageModel,
    example: EncodedSample,
    contenders: Sequence[Contender],
    *,
    settings: Sequence[str],
    num_following: int,
    seed: int,
) -> list[PreparedContext]:
    """Run context, question and reference answer once, and prepare the context of each setting.

    Args:
        model: The language model.
        example: The example, encoded.
        contenders: Methods, which say what of the prefill they need.
        settings: `query_agnostic`, `query_aware` or both.
        num_following: Tokens that will run after the question, at most.
        seed: Of the example.

    Raises:
        InputError: Naming the sample, if it is too long for the model or what the model computes is not finite.
    """
    cuts = [cut_sample(example, setting) for setting in settings]
    num_prompt = len(example.context_ids) + len(example.question_ids)
    model = model.for_answer(num_prompt, num_following, sample_id=example.sample.sample_id)
    methods = [contender.method for contender in contenders]
    whole = _prefill_once(model, example, methods, cuts)
    needs_rotary = any(method.needs_rotary for method in methods)
    rotary = read_rotary(model, model.sequence_tokens or whole.num_tokens) if needs_rotary else None
    return [
        PreparedContext(
            model=model,
            continuation=Continuation(example=example, cut=cut, whole=whole),
            state=replace(
                context_state(whole, cut.num_context),
                importance=importance(whole, num_context=cut.num_context, num_future=cut.num_future),
                rotary=rotary,
            ),
            seed=seed,
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


def _prefill_once(
    model: LanguageModel, example: EncodedSample, methods: Sequence[Method], cuts: Sequence[Cut]
) -> Prefill:
    """Prefill with all queries and logits that any method or cut needs."""
    needed = [method.num_queries for method in methods]
    token_ids = torch.tensor(example.context_ids + example.question_ids + example.answer_ids)
    num_tokens, num_future = len(token_ids), max(cut.num_future for cut in cuts)
    most = num_tokens if None in needed else max((count for count in needed if count is not None), default=0)
    try:
        return prefill(model, token_ids, num_queries=min(num_tokens, most + num_future), num_logits=num_future + 1)
    except InputError as error:
        raise InputError(f"sample {example.sample.sample_id}: {error}") from error
