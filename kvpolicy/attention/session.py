"""The attention function that lets the library see and replace what a layer attends to.

transformers calls one registered function for every layer (`AttentionInterface`). Ours asks the *session* that is
active in the calling context what to do: record a prefill, or attend to a compacted cache that the session holds. No
model code is patched and nothing stays behind on a module. Without a session it is plain SDPA, or the model's own eager
attention where SDPA cannot compute it (caps, sinks).

Libraries wrap registered functions and pass their arguments by position, as transformers' own functions take them
(kvpress does when it is imported), so ours has their signature, and its SDPA is the one that is registered.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvpolicy.attention.logit_scale import LogitScale
from kvpolicy.errors import InputError

ATTENTION_NAME = "kvpolicy"

_CAPPED_BYTES = 64 * 2**20  # of the logits of a block, in float32


@runtime_checkable
class AttentionSession(Protocol):
    """Decides what one forward pass attends to."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "row query_head token dim"],
        key: Float[Tensor, "row kv_head token dim"],
        value: Float[Tensor, "row kv_head token dim"],
        scaling: LogitScale,
    ) -> Float[Tensor, "row query_head token dim"]:
        """Return the attention output of one layer for the tokens of this pass."""

    @property
    def num_positions(self) -> int:
        """Positions up to the newest token of this pass, evicted ones included: what a sliding window must hold."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """One call of the attention function, as the model made it.

    Attributes:
        module: The layer's attention module.
        query: Post-RoPE queries of the tokens of this pass.
        key: Post-RoPE keys, those of the model's own cache first.
        value: Values of the same entries.
        mask: True where a query may look, or None: each sees the tokens up to and including itself.
        scaling: Factor on the logits, where the model gives one.
        options: Whatever else the model gives its attention function.
    """

    module: nn.Module
    query: Float[Tensor, "row query_head token dim"]
    key: Float[Tensor, "row kv_head entry dim"]
    value: Float[Tensor, "row kv_head entry dim"]
    mask: Tensor | None
    scaling: float | None
    options: dict[str, Any]

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return int(self.module.layer_idx)  # type: ignore[arg-type]  # an attribute

    @property
    def scale(self) -> LogitScale:
        """Factor on the products, given or by default, and their cap."""
        factor = float(self.query.shape[-1] ** -0.5) if self.scaling is None else self.scaling
        return LogitScale(factor=factor, cap=self.options.get("softcap") or None)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionObserver:
    """Answers calls of passes that run on the model's own cache (`kvpolicy.inference.fidelity`)."""

    answer: Callable[[AttentionCall], Tensor]


_active_session: ContextVar[AttentionSession | AttentionObserver | None] = ContextVar(
    "kvpolicy_attention_session", default=None
)


@contextmanager
def attention_session(session: AttentionSession | AttentionObserver) -> Iterator[None]:
    """Make `session` the one that registered attention asks, in this context only."""
    token = _active_session.set(session)
    try:
        yield
    finally:
        _active_session.reset(token)


def register_attention() -> None:
    """Make the function known to transformers under `ATTENTION_NAME`; calling it again changes nothing.

    The mask function is registered under the same name: without one transformers passes no mask, and SDPA's causal
    flag is aligned to the top left, which is wrong whenever there are fewer queries than keys.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def _attention(  # noqa: PLR0917  # the signature that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    session = _active_session.get()
    call = AttentionCall(
        module=module, query=query, key=key, value=value, mask=attention_mask, scaling=scaling, options=kwargs
    )
    if session is None and call.scale.cap is None and kwargs.get("s_aux") is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]  # with what others wrapped around it, such as kvpress' masks
        plain: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, dropout, scaling=scaling, **kwargs)
        return plain
    if session is None:
        output = own_attention(call)
    elif isinstance(session, AttentionObserver):
        output = session.answer(call)
    else:
        _refuse_unsupported(kwargs, num_positions=session.num_positions)
        output = session.attend(call.layer, query, key, value, call.scale)
    return output.transpose(1, 2).contiguous(), None


def own_attention(call: AttentionCall) -> Float[Tensor, "row query_head token dim"]:
    """Answer a call as the model's own function does: eager attention of its architecture, or SDPA if it has none.

    Eager attention makes a matrix of all pairs of queries and keys.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sources = (sys.modules[kind.__module__] for kind in type(call.module).__mro__)
    functions = (getattr(source, "eager_attention_forward", None) for source in sources)
    function = next((function for function in functions if function is not None), sdpa_attention_forward)
    visible, dtype = call.mask, call.query.dtype
    if visible is None:
        num_new, num_entries = call.query.shape[2], call.key.shape[2]
        visible = torch.ones(1, 1, num_new, num_entries, dtype=torch.bool, device=call.query.device)
        visible = visible.tril(num_entries - num_new)
    mask = visible.to(dtype)
    if visible.dtype == torch.bool:
        mask = torch.zeros_like(mask).masked_fill_(~visible, torch.finfo(dtype).min)
    output: Tensor = function(
        call.module, call.query, call.key, call.value, mask, scaling=call.scaling, **call.options
    )[0]
    return output.transpose(1, 2)


def _refuse_unsupported(kwargs: dict[str, Any], num_positions: int) -> None:
    window = kwargs.get("sliding_window")
    if window is not None and window < num_positions:
        raise InputError(
            f"a layer attends to a sliding window of {window} tokens and the sequence has {num_positions}: "
            "use samples that fit in the window, or a model without one"
        )
    if kwargs.get("s_aux") is not None:
        raise InputError("the model has attention sinks of its own, which is not supported")


def attend_causally(
    query: Float[Tensor, "row query_head token dim"],
    key: Float[Tensor, "row kv_head token dim"],
    value: Float[Tensor, "row kv_head token dim"],
    scaling: LogitScale,
) -> Float[Tensor, "row query_head token dim"]:
    """Grouped-query attention of tokens to themselves and to the tokens before them."""
    if scaling.cap is not None:
        return _attend_capped(query, key, value, scaling, mask=None)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling.factor, enable_gqa=True
    )


def attend_masked(
    query: Float[Tensor, "row query_head token dim"],
    key: Float[Tensor, "row kv_head past dim"],
    value: Float[Tensor, "row kv_head past dim"],
    scaling: LogitScale,
    mask: Float[Tensor, "row #kv_head token_of_group past"],
) -> Float[Tensor, "row query_head token dim"]:
    """Grouped-query attention without repeating keys: the group is folded into the queries.

    Args:
        query: Post-RoPE queries; query head h belongs to KV head h // group.
        key: Keys, past and present.
        value: Values of the same entries.
        scaling: Factor on the products of queries and keys, and their cap.
        mask: Added to the logits: 0 or -inf for the tokens of each member of the group in turn, the same for
            all KV heads or one for each.
    """
    if scaling.cap is not None:
        return _attend_capped(query, key, value, scaling, mask=mask)
    rows, num_query_heads, num_tokens, dim = query.shape
    folded = query.reshape(rows, key.shape[1], -1, dim)
    output = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling.factor)
    return output.reshape(rows, num_query_heads, num_tokens, dim)


def _attend_capped(
    query: Float[Tensor, "row query_head token dim"],
    key: Float[Tensor, "row kv_head past dim"],
    value: Float[Tensor, "row kv_head past dim"],
    scaling: LogitScale,
    *,
    mask: Float[Tensor, "#row #kv_head token_of_group past"] | None,
) -> Float[Tensor, "row query_head token dim"]:
    """Attend with capped logits, which SDPA cannot, in blocks of tokens: memory grows linearly with the entries.

    Args:
        query: As in `attend_masked`.
        key: Keys.
        value: Values.
        scaling: With a cap.
        mask: As in `attend_masked`; None where tokens are as many as entries and see those up to themselves.
    """
    rows, num_query_heads, num_tokens, dim = query.shape
    num_kv_heads, num_entries = key.shape[1:3]
    grouped = query.reshape(rows, num_kv_heads, -1, num_tokens, dim)
    keys, values = key[:, :, None].float().transpose(-1, -2), value[:, :, None]
    if mask is not None:
        mask = mask.view(*mask.shape[:2], -1, num_tokens, num_entries)
    block = max(1, _CAPPED_BYTES // (rows * num_query_heads * num_entries * 4))
    outputs = []
    for start in range(0, num_tokens, block):
        end = min(start + block, num_tokens)
        logits = scaling.capped(grouped[..., start:end, :].float() @ keys * scaling.factor)
        if mask is None:
            later = torch.ones(end - start, num_entries, dtype=torch.bool, device=query.device).triu(start + 1)
            logits = logits.masked_fill(later, -torch.inf)
        else:
            logits = logits + mask[..., start:end, :]
        outputs.append(logits.softmax(dim=-1).to(value.dtype) @ values)
    return torch.cat(outputs, dim=3).reshape(rows, num_query_heads, num_tokens, dim)
