"""Progress for people: bars on a terminal, plain lines elsewhere, always on standard error."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("kvpolicy")
_SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def progress(what: str, total: int, unit: str, *, bar: bool = True) -> Iterator[Callable[[str], None]]:
    """Show how far a long piece of work is; call what it gives once for every unit done.

    Args:
        what: The work, such as `collect`.
        total: Units in all.
        unit: Their name in the plural, such as `samples`.
        bar: Whether it may be a bar on a terminal; of two works of which one is within the other, only one may.

    Yields:
        A function that advances by one unit and takes a note to show, or an empty one.
    """
    # Workers of a flow show nothing: it counts the parts that they have done.
    show = _bar if bar and sys.stderr.isatty() and LOGGER.isEnabledFor(logging.INFO) else _lines
    with show(what, total, unit) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int, unit: str) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task(what, total=total, note="")
        yield lambda note: bars.update(bar, advance=1, note=note)


@contextmanager
def _lines(what: str, total: int, unit: str) -> Iterator[Callable[[str], None]]:
    started = last = time.monotonic()
    done = 0

    def advance(note: str) -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if done == total or now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            told = [f"{now - started:.0f} s"]
            if done < total:
                told.append(f"about {(now - started) / done * (total - done):.0f} s left")
            LOGGER.info("%s: %d/%d %s, %s", what, done, total, unit, ", ".join([*told, *([note] if note else [])]))

    yield advance
