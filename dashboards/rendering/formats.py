"""Numbers, durations, times and names as people read them: the same in every table, figure and page."""

import math
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

NOTHING = "–"
ID = re.compile(r"\b[a-z]+(?:_[a-z]+)*-[0-9a-f]{16}\b")
"""An id of the catalog: of a run, or of an artifact."""
CODE = re.compile(rf"`(?P<code>[^`\n]+)`|(?P<id>{ID.pattern})")
"""Text that is set as code: between backticks, and ids."""


def is_number(value: Any) -> bool:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def number(value: float | None, *, signed: bool = False) -> str:
    """Three significant digits; whole numbers from 1000 on; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    sign = "+" if signed else ""
    return f"{value:{sign},.0f}" if abs(value) >= 999.5 else f"{value:{sign}.3g}"


def interval(low: float | None, high: float | None, *, signed: bool = False) -> str:
    """The ends in brackets, or `[no interval]`."""
    if not (is_number(low) and is_number(high)):
        return "[no interval]"
    return f"[{number(low, signed=signed)}, {number(high, signed=signed)}]"


def with_interval(value: float | None, low: float | None, high: float | None, *, signed: bool = False) -> str:
    """`0.312 [0.25, 0.38]`."""
    return f"{number(value, signed=signed)} {interval(low, high, signed=signed)}"


def samples(counts: Iterable[int]) -> str:
    """`8 samples`, `4 to 8 samples`."""
    ordered = sorted(counts)
    return f"{' to '.join(dict.fromkeys(map(str, (ordered[0], ordered[-1]))))} samples"


def percent(share: float) -> str:
    """A share in whole percent, with a decimal under ten."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def duration(seconds: float) -> str:
    """Seconds, minutes and seconds, or hours and minutes."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def moment(when: datetime) -> str:
    """A time to the minute, such as 2026-03-01 09:30."""
    return f"{when:%Y-%m-%d %H:%M}"


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def sentence(text: str) -> str:
    """The text with a capital first letter, and all else as it is."""
    return text[:1].upper() + text[1:]


def counted(count: int, one: str, several: str = "") -> str:
    """`1 budget`, `2 budgets`."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def short_number(value: float) -> str:
    """Two significant digits under 10, without a leading 0, and whole numbers from there on; small ones as 4e-5.

    For a terminal, where a value with its interval at each of eight budgets has to fit beside the others.
    """
    if value == 0:
        return "0"
    if abs(value) < 0.00095:
        mantissa, exponent = f"{value:.0e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) >= 9.95:
        return f"{value:.0f}"
    return f"{value:#.2g}".replace("0.", ".", 1) if abs(value) < 0.995 else f"{value:.1f}"
