"""How much of a GPU a part asks its engine for: several head groups may share one, a model has one for itself."""

import math


def gpu_share(needed_bytes: int | None, gpu_bytes: int) -> float:
    """Share of one GPU, in whole hundredths and never more than all of it; all of it where the need is not known."""
    if needed_bytes is None:
        return 1.0
    return min(1.0, math.ceil(100 * needed_bytes / gpu_bytes) / 100)
