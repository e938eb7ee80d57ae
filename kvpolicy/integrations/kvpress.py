"""A policy set as a press of the kvpress library, for those who compress caches with that.

kvpress prunes the cache of each layer in a hook, right after the layer's prefill: it asks a press to score the entries
and keeps those with the highest scores. Ours scores with the agents of the layer and ranks as everywhere here
(`kvpolicy.ranking`): the first and the last tokens always stay, and ties go by position. So a press that keeps b tokens
keeps those that `kvpolicy.compressed_generate` keeps at budget b.

Not for what kvpress does beside that: chunks, eviction while decoding and budgets that differ by head. Scores are ranks
within a head, so wrappers that compare scores across heads share budgets equally.

kvpress 0.5.5 needs transformers < 5.3 and pandas < 3, so it lives in an environment of its own (`make test-kvpress`).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvpolicy.errors import InputError
from kvpolicy.models.language_model import read_spec
from kvpolicy.models.reference import find_model
from kvpolicy.policies.policy_set import PolicySet
from kvpolicy.ranking import check_budget, retention_ranks

try:
    from kvpress import ScorerPress
    from kvpress.utils import compute_n_kept
except ImportError as error:
    raise ImportError(
        f"kvpress cannot be imported ({error}): install it beside kvpolicy in an environment of its own, as it needs "
        "older releases of transformers and pandas (constraints-kvpress.txt)"
    ) from error


@dataclass
class PolicyPress(ScorerPress):  # type: ignore[misc]  # without kvpress there is nothing to check it against
    """Keeps what a policy set ranks highest.

    Example:
        with PolicyPress(compression_ratio=0.5, policy=load_policy(folder))(model):
            model(input_ids, past_key_values=cache)

    Attributes:
        compression_ratio: Share of the entries that is evicted, at least 0 and below 1.
        policy: The policy set; its weights are moved to the model's device.
        model_digest: Of the model that the press is used on, for one that was not loaded from a folder
            (`kvpolicy.models.reference.resolve_model` gives it); by default that of the folder.
    """

    policy: PolicySet = field(kw_only=True)
    model_digest: str = field(default="", kw_only=True)

    def post_init_from_model(self, model: Any) -> None:
        """Refuse a model that the policy was not trained for; kvpress calls this before anything is compressed.

        Raises:
            InputError: If its digest is another one or cannot be told.
        """
        self.policy.require_model(self.model_digest or _digest_of(model))
        if (spec := read_spec(model.config)) != self.policy.spec:
            raise InputError(f"the policy set is for {self.policy.spec}, the model is {spec}: use that of its training")
        self.policy.agents.to(model.device)

    def score(  # noqa: PLR0917  # as kvpress calls it
        self,
        module: nn.Module,
        hidden_states: Float[Tensor, "row token width"],
        keys: Float[Tensor, "row kv_head token dim"],
        values: Float[Tensor, "row kv_head token dim"],
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Float[Tensor, "row kv_head token"]:
        """Rank the entries of one layer: the negative rank, so that the entry that is kept longest scores highest.

        Raises:
            InputError: If fewer entries would be kept than the always-kept tokens, these are not the entries of one
                whole prompt, or prompts are padded.
        """
        del hidden_states, attentions
        num_rows, num_kv_heads, num_tokens = keys.shape[:3]
        check_budget(compute_n_kept(num_tokens, self.compression_ratio), num_tokens)
        _refuse_padding(kwargs.get("attention_mask"))
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # of transformers
        heads = slice(layer * num_kv_heads, (layer + 1) * num_kv_heads)
        positions = _positions(kwargs, num_rows, num_tokens)
        ranks = [
            retention_ranks(self._scores(*entries, heads)) for entries in zip(keys, values, positions, strict=True)
        ]
        return -torch.stack(ranks).float()  # exact up to 2^24 tokens

    @torch.no_grad()
    def _scores(
        self,
        keys: Float[Tensor, "kv_head token dim"],
        values: Float[Tensor, "kv_head token dim"],
        positions: Int[Tensor, "token"],
        heads: slice,
    ) -> Float[Tensor, "kv_head token"]:
        scores: Tensor = self.policy.agents(keys, values, positions[None], heads=heads)
        return scores.float()


def _positions(kwargs: dict[str, Any], num_rows: int, num_tokens: int) -> Int[Tensor, "row token"]:
    """Original positions of the entries, as the layer was given them."""
    positions: Tensor | None = kwargs.get("position_ids")
    if positions is None:
        positions = kwargs["cache_position"][None]
    if positions.shape[-1] != num_tokens:
        raise InputError(
            f"a layer holds {num_tokens} entries after {positions.shape[-1]} tokens: the press ranks whole prompts, "
            "not chunks of one, caches that another press compressed, or what is decoded"
        )
    return positions.expand(num_rows, -1)


def _refuse_padding(mask: Tensor | None) -> None:
    """Padding would be ranked as if it were text, and the first of it always kept."""
    if mask is None:
        return
    last = mask if mask.ndim == 2 else mask[:, :, -1]  # what the last token sees
    seen = last > torch.finfo(last.dtype).min / 2 if last.is_floating_point() else last.bool()
    if not seen.all():
        raise InputError(
            "prompts of a batch are padded: give the press prompts of equal length, or one after the other"
        )


def _digest_of(model: Any) -> str:
    name = str(model.name_or_path)
    try:
        found = find_model(name) if name else None
    except InputError:
        found = None
    if found is None:
        raise InputError(
            f"which model {name!r} is cannot be told, as it is no model folder: pass model_digest, "
            "which kvpolicy.models.reference.resolve_model gives"
        )
    return found.digest
