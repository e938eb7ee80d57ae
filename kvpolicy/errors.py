"""The error that callers see when what they passed cannot be used, and messages of errors as one line."""

import re

_RUST_PLACE = re.compile(r",? \S+\.rs:\d+(:\d+)?")  # Lance and zarrs end messages with places in their own sources
_MOST_LETTERS = 300


class InputError(ValueError):
    """A wrong input: one line that says what was wrong, where, what was expected and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened, with the next where it ends in a colon; else its type."""
    if isinstance(error, KeyError) and error.args:
        return f"no {error}"  # its message is the key alone
    lines = [line.strip() for line in _RUST_PLACE.sub("", str(error)).strip().splitlines()]
    shown = " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__
    return shown[:_MOST_LETTERS]


def message_with_notes(error: BaseException) -> str:
    """What an error says, with the notes that were added on its way: where it came up."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{error} ({notes})" if notes else str(error)
