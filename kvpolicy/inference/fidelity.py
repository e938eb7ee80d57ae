"""Is what the sessions compute the model's own attention? Asked of every model when it is loaded, on a few tokens.

Two comparisons, since neither finds everything:

- *Calls*: the model runs on a cache of its own, and each layer's call of the attention function is answered twice: by
  the model's own function (eager, as transformers has it for the architecture) with the model's mask and cache, and by
  a `CompactedCache` that holds everything. Both get the same states in float32, whatever the model's type, so that
  rounding hides nothing: a scale, cap, bias or mask that is another one shows.
- *Passes*: the library's own passes: the whole text at once, a chunk on the cache of what comes before it, and token by
  token. Keys, values and logits must be those of the model on its own cache, up to the rounding of the model's type:
  positions and whatever else a model does besides attention show here.

Not for what differs only on longer samples: sliding windows and frequencies that depend on the length are refused by
position (`kvpolicy.models.language_model`).
"""

import inspect
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.attention.prefill import prefill
from kvpolicy.attention.session import AttentionCall, AttentionObserver, attention_session, own_attention
from kvpolicy.errors import InputError
from kvpolicy.inference.cache import CompactedCache, run_alike
from kvpolicy.models.finite import is_finite, not_finite_error
from kvpolicy.models.language_model import LanguageModel

WHOLE, IN_CHUNKS, BY_TOKEN = "of a whole text", "in chunks", "token by token"
FIRST_KEYS = "keys of the first layer"
_NUM_TOKENS = 28

CALL_TOLERANCE = 5e-3
"""Largest difference of an output of one call in float32; rounding makes 1e-5 of it, TensorFloat-32 1e-3. A scale that
is off by 1 % makes 2e-2 or more."""

ENTRY_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest difference of a layer's keys or values. On the embedded model rounding makes 2e-6, 0.002 and 0.015 of it, and
positions that are off by one 0.12 or more."""

LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.06, torch.bfloat16: 0.5}
"""Largest difference of a token's logits. Rounding makes much more of it than of entries: 1e-5, 0.012 and 0.2."""

WHOLE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.5, torch.bfloat16: 0.5}
"""Largest difference of entries behind the first layer where the whole text is one pass and the model's own are
several, and half of that of logits. Products of other shapes round otherwise, and a router that so takes another expert
changes all that follows."""

_TINY = 1e-12  # of what is all zero nothing differs


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """How far the sessions were from the model's own attention, in standard deviations of what was compared.

    Attributes:
        calls: By layer, the largest difference of an output of its attention function.
        passes: By path and by `keys`, `values` (of the layer where they differ most), `keys of the first layer` or
            `logits` (after the token where they differ most): the root mean square of the difference.
    """

    calls: dict[int, float]
    passes: dict[tuple[str, str], float]


def require_own_attention(model: LanguageModel) -> None:
    """Compare what the sessions compute with the model's own attention, and refuse what differs.

    Raises:
        InputError: Naming the path and by how many standard deviations, or the layer whose results are not finite.
    """
    fidelity = measure_fidelity(model)
    for layer, difference in fidelity.calls.items():
        if not difference <= CALL_TOLERANCE:
            raise InputError(
                f"the attention of layer {layer} on a cache that holds everything differs by {difference:.2g} standard "
                f"deviations from the model's own, expected at most {CALL_TOLERANCE}: it is not the grouped-query "
                "attention that is ranked"
            )
    for (path, name), difference in fidelity.passes.items():
        most = _tolerance(path, name, model.dtype)
        if not difference <= most:
            raise InputError(
                f"its {name} {path} differ by {difference:.2g} standard deviations from those of the model on its own "
                f"cache, expected at most {most} in {str(model.dtype).removeprefix('torch.')}: it keeps more than keys "
                "and values, or counts positions by itself"
            )


def _tolerance(path: str, name: str, dtype: torch.dtype) -> float:
    if path == WHOLE and name != FIRST_KEYS:
        return WHOLE_TOLERANCE[dtype] * (2 if name == "logits" else 1)
    return (LOGIT_TOLERANCE if name == "logits" else ENTRY_TOLERANCE)[dtype]


@torch.inference_mode()
def measure_fidelity(model: LanguageModel) -> Fidelity:
    """Run a few tokens in every way.

    Raises:
        InputError: If the model cannot be run, its layers do not call attention once each, or something is not finite.
    """
    limits = (model.spec.max_positions, model.window, model.change_tokens)
    num_tokens = min(_NUM_TOKENS, *(limit for limit in limits if limit))
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, model.embedding_table.shape[0], (num_tokens,), generator=generator)
    bounds = _bounds(num_tokens)
    whole = prefill(model, token_ids, num_queries=0, num_logits=num_tokens)
    reference = _run_own(model, token_ids, bounds)
    keys, values, of_first = reference.keys, reference.values, slice(model.spec.num_kv_heads)
    passes = {
        (WHOLE, FIRST_KEYS): _entry_difference(whole.keys[of_first], keys[of_first]),
        (WHOLE, "keys"): _entry_difference(whole.keys, keys),
        (WHOLE, "values"): _entry_difference(whole.values, values),
        (WHOLE, "logits"): _logit_difference(whole.logits, reference.logits),
    }
    reference.cache.crop(bounds[0][1])
    for start, end in bounds[1:]:
        logits = run_alike(model, reference.cache, token_ids[start:end], first_position=start)
        state, new = reference.cache.state(0), slice(start, end)
        path = IN_CHUNKS if end - start > 1 else BY_TOKEN
        for name, difference in (
            ("keys", _entry_difference(state.keys[:, new], keys[:, new])),
            ("values", _entry_difference(state.values[:, new], values[:, new])),
            ("logits", _logit_difference(logits[0], reference.logits[new])),
        ):
            passes[path, name] = max(passes.get((path, name), 0.0), difference)
    return Fidelity(calls=reference.calls, passes=passes)


def _bounds(num_tokens: int) -> list[tuple[int, int]]:
    """A first half, a chunk and a single token; fewer of them where there is little room. A pass more costs a tenth."""
    first = -(-num_tokens // 2)
    ends = sorted({first, max(first, num_tokens - 1), num_tokens})
    return list(pairwise([0, *ends]))


def _entry_difference(actual: Float[Tensor, "head token dim"], expected: Float[Tensor, "head token dim"]) -> float:
    """Difference of the KV head where it is largest."""
    actual, expected = actual.float().flatten(1), expected.float().flatten(1)
    return float(
        ((actual - expected).square().mean(dim=1) / expected.square().mean(dim=1).clamp_min(_TINY)).sqrt().max()
    )


def _logit_difference(actual: Float[Tensor, "token vocab"], expected: Float[Tensor, "token vocab"]) -> float:
    actual, expected = actual.float(), expected.float()
    return float(((actual - expected).square().mean(dim=1).sqrt() / expected.std(dim=1).clamp_min(_TINY)).max())


@dataclass(frozen=True, kw_only=True, eq=False)
class _OwnRun:
    """A run of the model on its own cache, and the cache that was filled beside it; both hold the same in float32."""

    logits: Float[Tensor, "token vocab"]
    keys: Float[Tensor, "head token dim"]
    values: Float[Tensor, "head token dim"]
    calls: dict[int, float]
    cache: CompactedCache


def _run_own(model: LanguageModel, token_ids: Int[Tensor, "token"], bounds: list[tuple[int, int]]) -> _OwnRun:
    spec, network = model.spec, model.network
    cache = CompactedCache.empty(model, torch.float32, num_new_tokens=len(token_ids))
    calls = dict.fromkeys(range(spec.num_layers), 0.0)
    cap = getattr(model.decoder.config, "attn_logit_softcapping", None) or None

    def answer(call: AttentionCall) -> Tensor:
        if call.scale.cap != cap:  # on logits as small as those of a few tokens a cap hardly shows
            raise InputError(f"layer {call.layer} caps its logits at {call.scale.cap}, config.json says {cap}")
        exact = replace(call, query=call.query.float(), key=call.key.float(), value=call.value.float())
        expected = own_attention(exact)
        new = slice(exact.key.shape[2] - exact.query.shape[2], None)
        attended = cache.attend(call.layer, exact.query, exact.key[:, :, new], exact.value[:, :, new], call.scale)
        if not (is_finite(expected) and is_finite(attended)):
            raise not_finite_error(f"attention in layer {call.layer}", model.dtype)
        difference = float((attended - expected).abs().max() / expected.std().clamp_min(_TINY))
        calls[call.layer] = max(calls[call.layer], difference)
        return expected.to(call.query.dtype)

    logits: list[Tensor] = []
    own_cache: dict[str, Any] = {}
    # Its name differs by release of transformers.
    name = "cache" if "cache" in inspect.signature(network.forward).parameters else "past_key_values"
    for start, end in bounds:
        positions = torch.arange(start, end)[None]
        with (
            cache.appending(positions, group_size=spec.group_size),
            attention_session(AttentionObserver(answer=answer)),
        ):
            output = network(input_ids=token_ids[None, start:end].to(model.device), use_cache=True, **own_cache)
        logits.append(output.logits[0])
        own_cache = {name: output[name]}
    state = cache.state(0)
    return _OwnRun(
        logits=torch.cat(logits), keys=state.keys.clone(), values=state.values.clone(), calls=calls, cache=cache
    )
