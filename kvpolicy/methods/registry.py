"""All eviction methods by name.

A new method is one file and one line here; the tests then run on it as on all others.
"""

import dataclasses
from collections.abc import Iterable

from kvpolicy.errors import InputError
from kvpolicy.methods.adakv import AdaKV
from kvpolicy.methods.base import Method
from kvpolicy.methods.expected_attention import ExpectedAttention
from kvpolicy.methods.full import Full
from kvpolicy.methods.h2o import H2O
from kvpolicy.methods.judgeq import JudgeQ
from kvpolicy.methods.keydiff import KeyDiff
from kvpolicy.methods.knorm import KNorm
from kvpolicy.methods.lagkv import LagKV
from kvpolicy.methods.learned import LearnedPolicy
from kvpolicy.methods.learned_heads import LearnedHeads
from kvpolicy.methods.oracle import Oracle
from kvpolicy.methods.pyramidkv import PyramidKV
from kvpolicy.methods.random import Random
from kvpolicy.methods.snapkv import SnapKV
from kvpolicy.methods.streaming_llm import StreamingLLM
from kvpolicy.methods.tova import TOVA

_METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        LearnedPolicy,
        LearnedHeads,
        JudgeQ,
        Random,
        StreamingLLM,
        KNorm,
        KeyDiff,
        LagKV,
        ExpectedAttention,
        SnapKV,
        PyramidKV,
        AdaKV,
        TOVA,
        H2O,
        Full,
        Oracle,
    )
}


def method_names() -> tuple[str, ...]:
    """Names of all methods, in the order in which tables show them."""
    return tuple(_METHODS)


def method_type(name: str) -> type[Method]:
    """The class behind a name, with its `description`, `reference`, `evicts` and `needs_importance`.

    Raises:
        InputError: If there is no such method.
    """
    if name not in _METHODS:
        raise InputError(f"method: {name!r} is unknown, expected one of {', '.join(_METHODS)}")
    return _METHODS[name]


def method_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Names of the modules whose code some methods are, each once.

    Raises:
        InputError: If there is no such method.
    """
    return tuple(dict.fromkeys(method_type(name).__module__ for name in names))


def make_method(name: str, **parameters: object) -> Method:
    """Make a method.

    Args:
        name: One of `method_names()`.
        **parameters: The method's own, such as `window_tokens` of snapkv or `policy` of kvp; the rest have defaults.

    Returns:
        The method, ready to score.

    Raises:
        InputError: If the name or a parameter is unknown, a needed parameter is missing or a value is wrong.
    """
    method = method_type(name)
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(method)}
    unknown = [parameter for parameter in parameters if parameter not in fields]
    missing = [field for field, required in fields.items() if required and field not in parameters]
    if unknown:
        raise InputError(
            f"method {name}: unknown parameter {', '.join(unknown)}, expected {', '.join(fields) or 'none'}"
        )
    if missing:
        raise InputError(f"method {name}: parameter {', '.join(missing)} is missing")
    return method(**parameters)
