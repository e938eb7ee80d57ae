"""A policy set as a press of the kvpress library, for those who compress caches with that.

kvpress prunes the cache of each layer in a hook, right after the layer's prefill: it asks a press to score the entries
and keeps those with the highest scores. Ours scores with the agents of the layer and ranks as everywhere here
(`kvpolicy.methods.ranking`): the first and the last tokens always stay, and ties go by position. So a press that keeps
b tokens keeps those that `kvpolicy.compressed_generate` keeps at budget b. Presses that wrap others get scores that
they can multiply, add up and compare between heads (`kvpolicy.integrations.worth`).

Not for what kvpress does beside that: parts of a prompt, and eviction while decoding
(`kvpolicy.integrations.kvpress_wrappers`).

kvpress 0.5.5 needs transformers < 5.3 and pandas < 3, so it lives in an environment of its own (`make test-kvpress`).
"""

import operator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvpolicy.errors import InputError
from kvpolicy.integrations.worth import worth_of_entries
from kvpolicy.methods.ranking import check_budget
from kvpolicy.models.language_model import read_spec
from kvpolicy.models.reference import find_model
from kvpolicy.policies.policy_set import PolicySet

try:
    from kvpress import ScorerPress
    from kvpress.utils import compute_n_kept

    from kvpolicy.integrations.kvpress_wrappers import refuse_wrappers
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
    _checked: tuple[Any, ...] = field(default=(), init=False, repr=False, compare=False)

    def post_init_from_model(self, model: Any) -> None:
        """Refuse what can be refused before anything is run; most wrappers pass this call of kvpress on.

        Raises:
            InputError: If the policy was not trained for the model, the model cannot be identified, or a press that
                wraps this one evicts while decoding.
        """
        refuse_wrappers(self)
        self._require_model(model.config.get_text_config(decoder=True))

    def score(  # noqa: PLR0917  # as kvpress calls it
        self,
        module: nn.Module,
        hidden_states: Float[Tensor, "row token width"],
        keys: Float[Tensor, "row kv_head token dim"],
        values: Float[Tensor, "row kv_head token dim"],
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Float[Tensor, "row kv_head token"]:
        """Score the entries of one layer: positive, and largest for the entry that is kept longest.

        Raises:
            InputError: If the policy was not trained for the model, fewer entries would be kept than the always-kept
                tokens, these are not the entries of one whole prompt, prompts are padded, or a press that wraps this
                one cannot use the scores.
        """
        del hidden_states, attentions
        num_rows, num_kv_heads, num_tokens = keys.shape[:3]
        refuse_wrappers(self, num_rows=num_rows)
        self._require_model(module.config)
        positions = _positions(kwargs, num_rows, num_tokens)
        check_budget(compute_n_kept(num_tokens, self.compression_ratio), num_tokens)
        _refuse_padding(kwargs.get("attention_mask"))
        self.policy.agents.to(keys.device)  # a model's layers may lie on several
        layer = int(module.layer_idx)  # type: ignore[arg-type]  # of transformers
        heads = slice(layer * num_kv_heads, (layer + 1) * num_kv_heads)
        with torch.no_grad():
            worth = [
                worth_of_entries(self.policy.agents(*entries, at[None], heads=heads).float())
                for *entries, at in zip(keys, values, positions, strict=True)
            ]
        return torch.stack(worth)

    def _require_model(self, config: Any) -> None:
        """Refuse a model that the policy was not trained for; its files are read once for every model.

        At scoring as well, as not every wrapper calls `post_init_from_model`.
        """
        asked = (config, self.policy, self.model_digest)
        if self._checked and all(map(operator.is_, self._checked, asked)):
            return
        self.policy.require_model(self.model_digest or _digest_of(config))
        if (spec := read_spec(config)) != self.policy.spec:
            raise InputError(f"the policy set is for {self.policy.spec}, the model is {spec}: use that of its training")
        self._checked = asked


def _positions(kwargs: dict[str, Any], num_rows: int, num_tokens: int) -> Int[Tensor, "row token"]:
    """Original positions of the entries, as the layer was given them."""
    positions: Tensor | None = kwargs.get("position_ids")
    if positions is None:
        positions = kwargs["cache_position"][None]
    if positions.shape[-1] != num_tokens:
        raise InputError(
            f"{num_tokens} entries are to be ranked after {positions.shape[-1]} tokens: the press ranks whole prompts, "
            "not chunks or blocks of one, caches that another press compressed, or what is decoded"
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


def _digest_of(config: Any) -> str:
    name = str(config.name_or_path or "")
    with suppress(InputError):
        if name and (reference := find_model(name)):
            return reference.digest
    raise InputError(
        f"cannot identify model {name!r}: not a model folder; pass model_digest, "
        "which kvpolicy.models.reference.resolve_model gives"
    )
