"""All eviction methods by name: our own, and those of the entry points `kvpolicy.methods` of installed packages.

A new method is one file and one line here; the tests then run on it as on all others.
"""

from typing import Any

from kvpolicy.config.registry import Registry
from kvpolicy.config.settings import read_settings
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
from kvpolicy.names import BOUNDS

_OWN = (
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
DEFAULT_METHODS = tuple(method.name for method in _OWN if method.trained != "soft_tokens")
"""Methods that take part where a request names none: our own that need no training beside that of policies."""


def _problem(name: str, method: Any) -> str:
    if not (isinstance(method, type) and issubclass(method, Method)):
        return "it is not a subclass of kvpolicy.methods.base.Method"
    needed = ("name", "description", "reference")
    missing = [field for field in needed if not isinstance(getattr(method, field, None), str)]
    if missing:
        return f"its class has no {' and no '.join(missing)}"
    return "" if method.name == name else f"its class is named {method.name!r}"


METHODS: Registry[type[Method]] = Registry("method", {method.name: method for method in _OWN}, check=_problem)


def method_names() -> tuple[str, ...]:
    """Names of all methods, in the order in which tables show them: the bounds last."""
    return (*(name for name in METHODS.names if name not in BOUNDS), *BOUNDS)


def method_type(name: str) -> type[Method]:
    """The class behind a name, with its `description`, `reference`, `evicts` and `needs_importance`.

    Raises:
        InputError: If there is no such method, or the package that offers it is broken.
    """
    return METHODS[name]


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
    return read_settings(method_type(name), parameters, f"method {name}")
