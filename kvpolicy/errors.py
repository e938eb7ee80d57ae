"""The error that callers of the library see when what they passed cannot be used."""


class InputError(ValueError):
    """A wrong input: one line that says what was wrong, where, what was expected and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def message_with_notes(error: BaseException) -> str:
    """What an error says, with the notes that were added on its way: where it came up."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{error} ({notes})" if notes else str(error)
