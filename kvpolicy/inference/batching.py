"""How many caches run at once: a batch is limited by the logits of its new tokens and by the entries that it holds."""

MAX_LOGITS = 64 * 2**20
"""Logits of all rows together: 256 MB of float32."""

MAX_ENTRIES = 16 * 2**10
"""Entries of each head, in all rows together."""


def rows_that_fit(*, num_logits: int, num_entries: int) -> int:
    """Rows of a batch, at least one.

    Args:
        num_logits: Logits of all new tokens of one row.
        num_entries: Cache entries that each head of a row has.
    """
    return max(1, min(MAX_LOGITS // max(1, num_logits), MAX_ENTRIES // max(1, num_entries)))
