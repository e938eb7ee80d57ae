"""Rotary positions of a GGUF file as transformers' rope parameters that give the same frequencies.

llama.cpp computes, for pair i of d rotated dimensions, the angle position · base^(-2i/d) / (factor · divisor_i) and
scales sines and cosines by an attention factor. Divisors are tensors of the file: `rope_freqs` (Llama 3.1 and later),
or `rope_factors_short` and `rope_factors_long` (LongRoPE, Phi-3) up to the original length and above it.
"""

import math
from typing import Any

import numpy as np

from kvpolicy.errors import InputError
from kvpolicy.models.gguf_file import ArchitectureFields, GgufFile

DIVISORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_TOLERANCE = 1e-5  # relative; the file's divisors are rounded to float32
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of every Llama 3 that was published
_LLAMA3_LENGTH = 8192


def read_rope(
    file: GgufFile,
    fields: ArchitectureFields,
    *,
    head_dim: int,
    max_positions: int,
    is_partly_rotary: bool,
) -> dict[str, Any]:
    """Take a header's fields on rotary positions and make rope parameters of them and of the file's divisors.

    Args:
        file: For its divisors.
        fields: Of the header.
        head_dim: Dimensions of a head.
        max_positions: The model's context length.
        is_partly_rotary: Whether the architecture may rotate fewer dimensions than a head has.

    Raises:
        InputError: If no rope parameters of transformers give the same.
    """
    rotated = fields.count("rope.dimension_count", head_dim)
    theta = fields.number("rope.freq_base", 10_000.0)
    base: dict[str, Any] = {"rope_theta": theta}
    if is_partly_rotary:
        base["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise InputError(f"it rotates {rotated} of {head_dim} dimensions of a head, which {file.architecture} does not")
    return base | _scaling(file, fields, theta=theta, pairs=rotated // 2, max_positions=max_positions)


def _scaling(
    file: GgufFile, fields: ArchitectureFields, *, theta: float, pairs: int, max_positions: int
) -> dict[str, Any]:
    kind = fields.take("rope.scaling.type") or "linear"  # what llama.cpp takes for granted
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    original = fields.count("rope.scaling.original_context_length", 0) or None
    attention = fields.number("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise InputError(f"its rotary positions are scaled by {kind!r}, which is not known here")
    if kind == "none":
        factor = 1.0
    divisors = [name for name in (DIVISORS, SHORT, LONG) if name in file.tensors]
    if divisors and (factor != 1.0 or kind == "yarn"):
        raise InputError(f"its rotary positions are scaled twice: by {kind} and by {divisors[0]}")
    if SHORT in divisors or LONG in divisors or kind == "longrope":
        if divisors != [SHORT, LONG] or original is None:
            raise InputError(f"LongRoPE needs {SHORT}, {LONG} and rope.scaling.original_context_length")
        return _longrope(
            _divisors(file, SHORT, pairs),
            _divisors(file, LONG, pairs),
            original=original,
            max_positions=max_positions,
            attention=attention,
        )
    if kind == "yarn":
        return _yarn(fields, factor=factor, original=original or max_positions, attention=attention)
    if divisors:
        values = _divisors(file, DIVISORS, pairs)
        return _divided(values, theta, original=original, max_positions=max_positions, attention=attention)
    if attention != 1.0:
        raise InputError(
            f"its header scales attention by {attention} (rope.scaling.attn_factor), which is not known here"
        )
    return {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _divisors(file: GgufFile, name: str, pairs: int) -> list[float]:
    values = file.values(name)
    if values.shape != (pairs,) or not (np.isfinite(values).all() and (values > 0).all()):
        raise InputError(f"tensor {name} must hold {pairs} divisors, one a rotated pair: copy or make it again")
    return [float(value) for value in values]


def _longrope(
    short: list[float], long: list[float], *, original: int, max_positions: int, attention: float
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "factor": max_positions / original,
        "attention_factor": attention,
    }


def _yarn(fields: ArchitectureFields, *, factor: float, original: int, attention: float) -> dict[str, Any]:
    """YaRN as both compute it: attention is scaled by 1 + ln(factor)/10, and by nothing besides."""
    others = {
        "attn_factor": attention,
        "yarn_attn_factor": fields.number("rope.scaling.yarn_attn_factor", 1.0),
        "yarn_ext_factor": fields.take("rope.scaling.yarn_ext_factor", 1.0),
    }
    for name, value in others.items():
        if value != 1.0:
            raise InputError(f"its header has rope.scaling.{name} = {value} with YaRN, which is not known here")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _divided(
    divisors: list[float], theta: float, *, original: int | None, max_positions: int, attention: float
) -> dict[str, Any]:
    """The same divisors at every length: Llama 3's rule where it gives them, else LongRoPE with one list for both."""
    length = original or _LLAMA3_LENGTH
    rule = _llama3_divisors(theta, len(divisors), factor=max(divisors), original=length)
    if attention == 1.0 and np.allclose(divisors, rule, rtol=_TOLERANCE, atol=0):
        if max(divisors) == 1.0:
            return {"rope_type": "default"}
        return {
            "rope_type": "llama3",
            "factor": max(divisors),
            "original_max_position_embeddings": length,
            **_LLAMA3,
        }
    return _longrope(divisors, divisors, original=max_positions, max_positions=max_positions, attention=attention)


def _llama3_divisors(theta: float, pairs: int, *, factor: float, original: int) -> list[float]:
    """Divisors by Llama 3's rule: 1 for short wavelengths, the factor for long ones, and a blend of both between."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    waves = [2 * math.pi * theta ** (pair / pairs) for pair in range(pairs)]
    shares = [min(max((original / wave - low) / (high - low), 0.0), 1.0) for wave in waves]
    return [1 / ((1 - share) / factor + share) for share in shares]
