"""The error that callers of the library see when what they passed cannot be used."""


class InputError(ValueError):
    """A wrong input: one line that says what was wrong, where, what was expected and what to do."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next where it ends in a colon; its type where there is none."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]) if lines else type(error).__name__


def message_with_notes(error: BaseException) -> str:
    """What an error says, with the notes that were added on its way: where it came up."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{error} ({notes})" if notes else str(error)
