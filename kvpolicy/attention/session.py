"""The attention function that lets the library see and replace what a layer attends to.

transformers calls one registered function for every layer (`AttentionInterface`). Ours asks the *session* that is
active in the calling context what to do: record a prefill, or attend to a compacted cache that the session holds. No
model code is patched and nothing stays behind on a module. Without a session it is plain SDPA.

Libraries wrap registered functions and pass their arguments by position, as transformers' own functions take them
(kvpress does when it is imported), so ours has their signature, and its SDPA is the one that is registered.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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
    def scale(self) -> float:
        """Factor on the logits, given or by default."""
        return float(self.query.shape[-1] ** -0.5) if self.scaling is None else self.scaling


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionObserver:
    """Answers calls of passes that run on the model's own cache (`kvpolicy.fidelity`)."""

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
    if session is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]  # with what others wrapped around it, such as kvpress' masks
        plain: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, dropout, scaling=scaling, **kwargs)
        return plain
    call = AttentionCall(
        module=module, query=query, key=key, value=value, mask=attention_mask, scaling=scaling, options=kwargs
    )
    if isinstance(session, AttentionObserver):
        output = session.answer(call)
    else:
        _refuse_unsupported(kwargs, num_positions=session.num_positions)
        output = session.attend(call.layer, query, key, value, call.scale)
    return output.transpose(1, 2).contiguous(), None


def _refuse_unsupported(kwargs: dict[str, Any], num_positions: int) -> None:
    window = kwargs.get("sliding_window")
    if window is not None and window < num_positions:
        raise InputError(
            f"a layer attends to a sliding window of {window} tokens and the sequence has {num_positions}: "
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
