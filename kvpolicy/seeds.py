"""Deriving independent seeds from one, so that no two things of a run draw the same numbers."""

import hashlib

MAX_SEED = 2**63 - 1
# torch's CPU generator uses the lower 32 bits of a seed only.
_DERIVED_BITS = 32


def derive_seed(*parts: int | str) -> int:
    """A seed from 0 to 2^32 - 1 that depends on the parts as text, joined by `/`: other text, other seed."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[: _DERIVED_BITS // 8], "big")


def spawn_seeds(seed: int, count: int) -> tuple[int, ...]:
    """`count` seeds that are unrelated to each other and to the one they come from."""
    return tuple(derive_seed(seed, index) for index in range(count))
