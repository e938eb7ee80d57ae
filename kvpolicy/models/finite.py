"""Checks that a model computes finite values, made where it computes them and before anything is ranked by them."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.errors import InputError


def is_finite(values: Float[Tensor, "*any"]) -> bool:
    """Whether there is neither NaN nor an infinity; makes no copy."""
    if not values.numel():
        return True
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


def not_finite_error(where: str, dtype: torch.dtype) -> InputError:
    """The error of a model that computed NaN or an infinity.

    Args:
        where: What is not finite, such as `logits`.
        dtype: Of the model.
    """
    return InputError(
        f"the model's {where} are not finite: its weights are damaged, or {str(dtype).removeprefix('torch.')} is too "
        "small for it; fetch it again, or load it in another dtype (bfloat16, float32)"
    )


def require_finite_entries(
    keys: Float[Tensor, "*row layer kv_head token dim"], values: Float[Tensor, "*row layer kv_head token dim"]
) -> None:
    """Check new cache entries of all layers.

    Raises:
        InputError: Naming the first layer whose keys or values are not finite.
    """
    if is_finite(keys) and is_finite(values):
        return
    for layer in range(keys.shape[-4]):
        for name, entries in (("keys", keys), ("values", values)):
            if not is_finite(entries[..., layer, :, :, :]):
                raise not_finite_error(f"{name} of layer {layer}", keys.dtype)
