"""Probing a cache: running embeddings that no token has on top of it, to see what they attend to.

The cache is read and never changed; the embeddings' positions follow the context's. Gradients flow to the embeddings
where the caller allows them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.attention.session import attend_masked, attention_session
from kvpolicy.attention.weights import attention_blocks
from kvpolicy.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeStates:
    """The probe's queries and keys in every layer, on top of a context.

    Attributes:
        queries: Post-RoPE queries, grouped by the KV head that they read.
        keys: Post-RoPE keys, which later embeddings of the probe see besides the context's.
    """

    queries: Float[Tensor, "head group probe dim"]
    keys: Float[Tensor, "head probe dim"]


class _Probing:
    """Attends to the context's cache and causally to the probe itself, and keeps the probe's queries and keys."""

    def __init__(self, keys: Tensor, values: Tensor, num_kv_heads: int, num_positions: int) -> None:
        by_layer = (-1, num_kv_heads, *keys.shape[1:])
        self._keys, self._values = keys.view(by_layer), values.view(by_layer)
        self.num_past_tokens = int(keys.shape[1])
        self.num_positions = num_positions
        self.probe_queries: dict[int, Tensor] = {}
        self.probe_keys: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: LogitScale) -> Tensor:
        num_kv_heads, num_probes = key.shape[1:3]
        self.probe_queries[layer] = query[0].reshape(num_kv_heads, -1, *query.shape[2:])
        self.probe_keys[layer] = key[0]
        mask = query.new_zeros(num_probes, self.num_past_tokens + num_probes)
        mask[:, self.num_past_tokens :].masked_fill_(torch.ones_like(mask[:, :num_probes]).triu(1).bool(), -torch.inf)
        return attend_masked(
            query,
            torch.cat((self._keys[None, layer], key), dim=2),
            torch.cat((self._values[None, layer], value), dim=2),
            scaling,
            mask=mask.repeat(query.shape[1] // num_kv_heads, 1)[None, None],
        )


def run_probe(
    model: LanguageModel,
    keys: Float[Tensor, "head token dim"],
    values: Float[Tensor, "head token dim"],
    embeddings: Float[Tensor, "probe width"],
    *,
    first_position: int | None = None,
) -> ProbeStates:
    """Run embeddings on top of a context's cache.

    Args:
        model: The language model.
        keys: Post-RoPE keys of the context.
        values: Its values.
        embeddings: They take the place of the tokens' embeddings.
        first_position: Original position of the first embedding; the length of the cache unless it was compacted.

    Raises:
        InputError: If a position is beyond what the model was made for, or the embeddings are of another width.
    """
    first = keys.shape[1] if first_position is None else first_position
    end = first + embeddings.shape[0]
    probing = _Probing(keys, values, model.spec.num_kv_heads, num_positions=end)
    with attention_session(probing):
        model.run_embeddings(embeddings[None], torch.arange(first, end)[None])
    layers = range(model.spec.num_layers)
    return ProbeStates(
        queries=torch.cat([probing.probe_queries[layer] for layer in layers]),
        keys=torch.cat([probing.probe_keys[layer] for layer in layers]),
    )


def probe_attention(
    probe: ProbeStates, keys: Float[Tensor, "head token dim"], *, scaling: LogitScale
) -> Float[Tensor, "head token"]:
    """Attention that the probe pays to each token of the context, averaged over its embeddings and over the group."""
    everything = torch.cat((keys, probe.keys), dim=1)
    return mean_attention(probe.queries, everything, num_context=keys.shape[1], scaling=scaling)


def mean_attention(
    queries: Float[Tensor, "head group query dim"],
    keys: Float[Tensor, "head token dim"],
    *,
    num_context: int,
    scaling: LogitScale,
) -> Float[Tensor, "head context"]:
    """Attention of the queries of the last tokens to the first `num_context`, averaged over queries and group."""
    sums: dict[int, Tensor] = {}  # by the first head of a block; nothing is changed in place, so gradients flow
    for heads, weights in attention_blocks(queries, keys, scaling=scaling):
        seen = weights[..., :num_context].mean(dim=1).sum(dim=1)
        sums[heads.start] = sums.get(heads.start, 0.0) + seen
    return torch.cat(list(sums.values())) / queries.shape[2]
