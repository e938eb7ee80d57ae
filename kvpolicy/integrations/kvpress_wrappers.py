"""Presses of kvpress that wrap another one: which they are at the moment, and which use of ours is refused.

A wrapper asks a press for its scores and does something else with them: multiplies them, compares heads, decides for
chunks. Most are right for the scores of `kvpolicy.integrations.worth`. Refused are those that ask at a time or in an
order in which a policy set cannot rank, or that mix up the rows of a batch (kvpress 0.5.5; docs/using.md has them all).

The always-kept tokens have the largest scores of all. A wrapper that keeps chunks, or has budgets of its own by head,
may still have less room than they need.
"""

import inspect

from kvpress import (
    AdaKVPress,
    BasePress,
    ChunkKVPress,
    ComposedPress,
    CriticalAdaKVPress,
    DecodingPress,
    DMSPress,
    LUKVPress,
)

from kvpolicy.errors import InputError

_MASKING = (AdaKVPress, CriticalAdaKVPress, DMSPress, LUKVPress)  # they note which indices attention leaves out


def wrappers_of(press: BasePress) -> list[BasePress]:
    """Presses that are calling this one, from the innermost to the one that is used on the model.

    kvpress gives a press no word of what wraps it, so it is read off the call stack: up to the caller that is no press,
    which is a layer of the model or a `with` statement.
    """
    wrappers: list[BasePress] = []
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self", press)
        if not isinstance(caller, BasePress):
            break
        if all(caller is not known for known in (press, *wrappers)):
            wrappers.append(caller)
        frame = frame.f_back
    return wrappers


def refuse_wrappers(press: BasePress, *, num_rows: int = 1) -> None:
    """Refuse the wrappers that would not do with our scores what they are for.

    Args:
        press: Ours; called by the wrappers.
        num_rows: Prompts of the batch.

    Raises:
        InputError: If one evicts while decoding, runs other presses first, masks entries that another press then moves,
            or treats all rows of a batch as the first.
    """
    inner = press
    for wrapper in wrappers_of(press):
        name = type(wrapper).__name__
        if isinstance(wrapper, DecodingPress) or (isinstance(wrapper, DMSPress) and wrapper.decoding):
            raise InputError(
                f"{name} evicts while decoding, and a policy set ranks whole prompts: use the press for the prefill, "
                "by itself or as prefilling_press of PrefillDecodingPress"
            )
        if isinstance(wrapper, ComposedPress):
            _refuse_place(wrapper, inner)
        if num_rows > 1 and isinstance(wrapper, ChunkKVPress | CriticalAdaKVPress):
            raise InputError(
                f"{name} chooses for all {num_rows} prompts of a batch at once: give it one prompt after the other"
            )
        inner = wrapper


def _refuse_place(composed: ComposedPress, inner: BasePress) -> None:
    first, *others = composed.presses
    if first is not inner:
        raise InputError(
            f"ComposedPress has {type(first).__name__} before {type(inner).__name__}, and a policy set ranks keys and "
            "values as the model wrote them: put it first"
        )
    if others and isinstance(inner, _MASKING):
        raise InputError(
            f"ComposedPress has {type(others[0]).__name__} after {type(inner).__name__}, which masks entries by their "
            "index in the whole cache: use it without ComposedPress"
        )
