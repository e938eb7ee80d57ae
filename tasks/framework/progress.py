"""Progress for people: bars on a terminal, plain lines elsewhere, always on standard error."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

LOGGER = logging.getLogger("kvpolicy")
SECONDS_BETWEEN_LINES = 15.0
_SHOWN: ContextVar["Progress | None"] = ContextVar("shown", default=None)


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
    """Show how far a long piece of work is.

    Args:
        what: The work, such as `collect`.
        total: Units in all.
        unit: Their name in the plural, such as `samples`.

    Yields:
        A function that takes a note to show, or an empty one, and the number of units done since, 1 by default.
    """
    with terminal_bars() as bars:
        if bars is None:
            yield _lines(what, total, unit)
            return
        bar = bars.add_task(what, total=total, unit=unit, note="")
        yield lambda note, units=1: bars.update(bar, advance=units, note=note)
        bars.remove_task(bar)  # what is within other work leaves no trace of each of its parts


@contextmanager
def terminal_bars() -> "Iterator[Progress | None]":
    """The bars on the terminal, one display for all who are within it; None where lines are shown."""
    # Workers of a flow show nothing: it counts the parts that they have done.
    if not (sys.stderr.isatty() and LOGGER.isEnabledFor(logging.INFO)):
        yield None
        return
    if (shown := _SHOWN.get()) is not None:
        yield shown
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        token = _SHOWN.set(bars)
        try:
            yield bars
        finally:
            _SHOWN.reset(token)


def duration(seconds: float) -> str:
    """A time span for people, as exact as they need it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _lines(what: str, total: int, unit: str) -> Callable[..., None]:
    started = last = time.monotonic()
    done = 0

    def advance(note: str, units: int = 1) -> None:
        nonlocal done, last
        done += units
        now = time.monotonic()
        if done == total or now - last >= SECONDS_BETWEEN_LINES:
            last = now
            words = [f"{now - started:.0f} s"]
            if done < total:
                words.append(f"about {duration((now - started) / done * (total - done))} left")
            LOGGER.info("%s: %d/%d %s, %s", what, done, total, unit, ", ".join([*words, *([note] if note else [])]))

    return advance
