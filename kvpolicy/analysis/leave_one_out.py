"""Does the score track the harm? One token at a time is taken out of every head, and the divergence is measured.

A score is of a token in one head, and the harm is that of a token in all of them; so scores are first made one number
a token (`token_scores`). Rankings are orders of tokens and nothing else, so the question is answered by Spearman's
correlation (`kvpolicy.analysis.ranks`) of scores and divergences in each sample, with an interval over samples.
"""

from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.analysis.ranks import normalised_ranks
from kvpolicy.attention.prefill import Prefill
from kvpolicy.errors import InputError
from kvpolicy.inference.batching import rows_that_fit
from kvpolicy.inference.cache import CompactedCache, run_alike
from kvpolicy.inference.likelihood import kl_divergence
from kvpolicy.methods.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS
from kvpolicy.models.language_model import LanguageModel


def token_scores(scores: Float[Tensor, "head token"]) -> Float[Tensor, "token"]:
    """A method's score of a token in all heads: the mean over heads of its normalised rank, 1 being kept longest.

    Scores of different heads, and of different methods, have no common scale; ranks have. For the oracle, whose scores
    are importances and have one, the token's score is the sum over heads: `importance.sum(dim=0)`.
    """
    return normalised_ranks(scores).mean(dim=0)


def choose_tokens(
    scores: Float[Tensor, "token"],
    count: int,
    *,
    seed: int,
    num_sink_tokens: int = NUM_SINK_TOKENS,
    num_recent_tokens: int = NUM_RECENT_TOKENS,
) -> Int[Tensor, "chosen"]:
    """Draw tokens from the whole range of a score: one from each of `count` strata of equally many ranks.

    The tokens that every budget keeps are left out, since no method decides about them.

    Args:
        scores: One number a token.
        count: Tokens to draw; all that there are to draw from, where they are fewer.
        seed: Seed of the draws.
        num_sink_tokens: First tokens that are left out.
        num_recent_tokens: Last tokens that are left out.

    Returns:
        Token indices, from the lowest to the highest stratum.

    Raises:
        InputError: If `count` is below 1, or there is no token between those that are left out.
    """
    candidates = scores[num_sink_tokens : scores.shape[0] - num_recent_tokens]
    if count < 1 or not len(candidates):
        raise InputError(
            f"leave one out: {count} of {len(candidates)} tokens between the {num_sink_tokens} first and "
            f"{num_recent_tokens} last that are always kept, expected at least 1 of each"
        )
    order = candidates.argsort(stable=True)
    bounds = np.linspace(0, len(order), min(count, len(order)) + 1).round().astype(int)
    generator = np.random.default_rng(seed)
    drawn = [int(generator.integers(first, last)) for first, last in pairwise(bounds)]
    return order[drawn] + num_sink_tokens


def all_but_one(tokens: Int[Tensor, "chosen"], *, num_heads: int, num_tokens: int) -> list[Int[Tensor, "head kept"]]:
    """For each token a row that keeps all others in every head, as `CompactedCache` takes them."""
    everything = torch.arange(num_tokens)
    return [everything[everything != int(token)].expand(num_heads, -1) for token in tokens]


def divergence_without(
    model: LanguageModel,
    whole: Prefill,
    tokens: Int[Tensor, "chosen"],
    future_ids: Int[Tensor, "future"],
    *,
    num_context: int,
) -> Float[Tensor, "chosen"]:
    """How far the model's predictions move when a single token leaves the caches of all heads.

    The reference is the full cache, run in the same way. A single token's harm can be as small as the rounding of
    bfloat16: use a model in float32.

    Args:
        model: The language model.
        whole: The prefill of the context, and of any tokens that follow it.
        tokens: Indices into the context, of which each leaves by itself.
        future_ids: Tokens that follow the context, teacher-forced.
        num_context: Tokens of the context.

    Returns:
        Mean KL divergence over the predictions after each future token, in nats, as the metric `kl`.

    Raises:
        InputError: If a token is not in the context.
    """
    if not len(tokens):
        return torch.zeros(0, device=whole.keys.device)
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < num_context:
        raise InputError(
            f"leave one out: tokens {int(tokens.min())} to {int(tokens.max())}, expected indices into a context of "
            f"{num_context}"
        )
    num_heads = whole.keys.shape[0]

    def run(kept: list[Tensor]) -> Tensor:
        cache = CompactedCache(
            whole.keys[:, :num_context],
            whole.values[:, :num_context],
            kept,
            num_kv_heads=whole.num_kv_heads,
            num_new_tokens=len(future_ids),
        )
        return run_alike(model, cache, future_ids, first_position=num_context)

    (full,) = run([torch.arange(num_context).expand(num_heads, -1)])
    size = rows_that_fit(num_logits=full.numel(), num_entries=num_context)
    divergences = [
        kl_divergence(full, run(all_but_one(batch, num_heads=num_heads, num_tokens=num_context))).mean(dim=1)
        for batch in torch.split(tokens, size)
    ]
    return torch.cat(divergences)
