"""The error that callers of the stores see."""


class StorageError(Exception):
    """A store that cannot serve the call: one line that says what, where and what to do."""
