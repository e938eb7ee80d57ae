"""Expected Attention: what queries like those seen so far will attend to from positions to come."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvpolicy.config.settings import Count, NotNegative, Positive
from kvpolicy.errors import InputError
from kvpolicy.methods.base import CacheState, Method, Scores
from kvpolicy.methods.ranking import NUM_SINK_TOKENS
from kvpolicy.models.rotary import Rotary, turn, turn_back

# Queries of some heads in float32; larger blocks leave a processor's cache and take up to ten times as long.
_MAX_BLOCK_BYTES = 4 * 2**20
_NO_LOGIT = -1e30  # of the sinks; finite, so that a context of nothing else still has a softmax


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Method):
    """Attention that a key expects of a Gaussian query at a position to come (arXiv 2510.00636, section 3).

    Queries of the context are turned back from their rotary positions. Of each query head their mean m and covariance S
    are taken and turned by the mean rotation R over the next `num_future_positions` positions. A Gaussian query then
    attends to key k, before normalisation, with

        E[exp(s q.k)] = exp(s k.(R m) + s^2 / 2 k.(R S R^T k))        s: the model's factor on query-key products

    and a(k), the same divided by its sum over the context, is averaged over the group. A token's score is

        (a(k) + epsilon) * norm(v)

    The first `num_sink_tokens` positions are left out of m, S and the sum, as they are outliers, and rank above all
    others.

    Departures: the norm is that of the value, not of the value after the output projection (the authors' own code does
    the same); the covariance is divided by the number of queries; queries may be those of the last chunk alone; where a
    model caps its logits (Gemma 2), the expectation is of logits without a cap.
    `epsilon` is 0, the default of the authors' code, which they evaluate with 0.01: on the embedded model's contexts of
    1,100 tokens that, and more, ranked far worse.

    Attributes:
        num_future_positions: Positions after the context over which rotations are averaged.
        num_sink_tokens: First positions that are left out of the statistics, and kept.
        epsilon: Added to the expected attention before it is weighed by the value.
    """

    name = "expected_attention"
    description = "Keeps what a Gaussian query at positions to come attends to, weighed by the value"
    reference = "arXiv 2510.00636"
    needs_rotary = True
    num_queries = None  # all; scoring takes as many as there are, such as those of the last chunk

    num_future_positions: Positive = 512
    num_sink_tokens: Count = NUM_SINK_TOKENS
    epsilon: NotNegative = 0.0

    def score(self, state: CacheState) -> Scores:
        """Score by expected attention times the norm of the value."""
        if state.rotary is None or not state.num_queries:
            missing = "rotary embedding" if state.rotary is None else "queries"
            raise InputError(f"method {self.name}: no {missing} in the cache state, expected those of the model")
        sinks = state.positions.expand(state.num_heads, -1) < self.num_sink_tokens
        scores = torch.empty(state.num_heads, state.num_tokens, device=state.keys.device)
        for here, mean, covariance in self._future_queries(state, state.rotary):
            logits = expected_logits(mean, covariance, state.keys[here].float(), scaling=state.scaling.factor)
            expected = logits.masked_fill(sinks[here, None], _NO_LOGIT).softmax(dim=-1).mean(dim=1)
            scores[here] = (expected + self.epsilon) * state.values[here].float().norm(dim=-1)
        return torch.where(sinks, scores.amax(dim=-1, keepdim=True) + 1.0, scores)

    def _future_queries(self, state: CacheState, rotary: Rotary) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Mean and covariance of queries at positions to come, for some heads at a time."""
        num_heads, group, count, dim = state.queries.shape
        positions = state.query_positions
        counted = (positions >= self.num_sink_tokens).expand(num_heads, -1)
        cos, sin = (part.expand(num_heads, -1, -1) for part in rotary.cos_sin(positions, num_heads=num_heads))
        steps = torch.arange(1, self.num_future_positions + 1, device=positions.device)
        ahead = rotary.cos_sin(positions[:, -1:] + steps, num_heads=num_heads)
        mean_cos, mean_sin = (part.mean(dim=1, keepdim=True).expand(num_heads, -1, -1) for part in ahead)
        block = max(1, _MAX_BLOCK_BYTES // (4 * group * max(count, state.num_tokens) * dim))
        for head in range(0, num_heads, block):
            here = slice(head, head + block)
            queries = turn_back(state.queries[here].float(), cos[here, None], sin[here, None])
            mean, covariance = query_statistics(queries, counted[here])
            for _ in range(2):  # R S R^T: rows and columns of a symmetric matrix are turned one after the other
                covariance = turn(covariance, mean_cos[here, None], mean_sin[here, None]).transpose(-1, -2)
            yield here, turn(mean, mean_cos[here], mean_sin[here]), covariance


def query_statistics(
    queries: Float[Tensor, "head group query dim"], counted: Bool[Tensor, "head query"]
) -> tuple[Float[Tensor, "head group dim"], Float[Tensor, "head group dim dim"]]:
    """Mean and covariance of the queries that count, or of all where none does."""
    weights = counted.float()
    weights = torch.where(counted.any(dim=-1, keepdim=True), weights, torch.ones_like(weights))
    weights = (weights / weights.sum(dim=-1, keepdim=True))[:, None, :, None]
    mean = (queries * weights).sum(dim=2)
    centred = (queries - mean[:, :, None]) * weights.sqrt()
    return mean, centred.transpose(-1, -2) @ centred


def expected_logits(
    mean: Float[Tensor, "head group dim"],
    covariance: Float[Tensor, "head group dim dim"],
    keys: Float[Tensor, "head token dim"],
    *,
    scaling: float,
) -> Float[Tensor, "head group token"]:
    """The logarithm of E[exp(scaling * q.k)] for Gaussian queries: that of the moment-generating function."""
    linear = mean @ keys.transpose(-1, -2)
    quadratic = ((keys[:, None] @ covariance) * keys[:, None]).sum(dim=-1)
    return scaling * linear + scaling**2 / 2 * quadratic
