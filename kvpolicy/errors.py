"""The error that callers of the library see when what they passed cannot be used."""


class InputError(ValueError):
    """A wrong input: one line that says what was wrong, where, what was expected and what to do."""
