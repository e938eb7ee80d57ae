"""The attention function that lets the library see and replace what a layer attends to.

transformers calls one registered function for every layer (`AttentionInterface`). Ours asks the *session* that is
active in the calling context what to do: record a prefill, or attend to a compacted cache that the session holds. No
model code is patched and nothing stays behind on a module. Without a session it is plain SDPA.

Libraries wrap registered functions and pass their arguments by position, as transformers' own functions take them
(kvpress does when it is imported), so ours has their signature, and its SDPA is the one that is registered.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvpolicy.errors import InputError

ATTENTION_NAME = "kvpolicy"


@runtime_checkable
class AttentionSession(Protocol):
    """Decides what one forward pass attends to."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "row query_head token dim"],
        key: Float[Tensor, "row kv_head token dim"],
        value: Float[Tensor, "row kv_head token dim"],
        scaling: float,
    ) -> Float[Tensor, "row query_head token dim"]:
        """Return the attention output of one layer for the tokens of this pass."""

    @property
    def num_past_tokens(self) -> int:
        """Cache entries that the tokens of this pass see besides themselves."""


_active_session: ContextVar[AttentionSession | None] = ContextVar("kvpolicy_attention_session", default=None)


@contextmanager
def attention_session(session: AttentionSession) -> Iterator[None]:
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
    if session is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]  # with what others wrapped around it, such as kvpress' masks
        plain: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, dropout, scaling=scaling, **kwargs)
        return plain
    _refuse_unsupported(kwargs, num_tokens=session.num_past_tokens + key.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = session.attend(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]  # an attribute
    return output.transpose(1, 2).contiguous(), None


def _refuse_unsupported(kwargs: dict[str, Any], num_tokens: int) -> None:
    window = kwargs.get("sliding_window")
    if window is not None and window < num_tokens:
        raise InputError(
            f"a layer attends to a sliding window of {window} tokens and the sample has {num_tokens}: "
            "use samples that fit in the window, or a model without one"
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise InputError(
            "the model caps its attention logits or has attention sinks of its own, which is not supported"
        )


def attend_causally(
    query: Float[Tensor, "row query_head token dim"],
    key: Float[Tensor, "row kv_head token dim"],
    value: Float[Tensor, "row kv_head token dim"],
    scaling: float,
) -> Float[Tensor, "row query_head token dim"]:
    """Grouped-query attention of tokens to themselves and to the tokens before them."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )


def attend_masked(
    query: Float[Tensor, "row query_head token dim"],
    key: Float[Tensor, "row kv_head past dim"],
    value: Float[Tensor, "row kv_head past dim"],
    scaling: float,
    mask: Float[Tensor, "row #kv_head token_of_group past"],
) -> Float[Tensor, "row query_head token dim"]:
    """Grouped-query attention without repeating keys: the group is folded into the queries.

    Args:
        query: Post-RoPE queries; query head h belongs to KV head h // group.
        key: Keys, past and present.
        value: Values of the same entries.
        scaling: Factor on the logits.
        mask: Added to the logits: 0 or -inf for the tokens of each member of the group in turn, the same for
            all KV heads or one for each.
    """
    rows, num_query_heads, num_tokens, dim = query.shape
    folded = query.reshape(rows, key.shape[1], -1, dim)
    output = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, num_query_heads, num_tokens, dim)
