"""A ranking as positive numbers that may be multiplied, added up and compared between heads, as attention may be.

Libraries that compress caches expect scores like attention: non-negative, growing with worth, adding up to one over a
head. They multiply them by the norms of values, add them up over chunks and compare those of different heads. The
scores of agents are logits of a Plackett-Luce distribution over rankings, so softmax(s) is such a number: the
probability that an entry is the head's first choice (`kvpolicy.methods.learned_heads` shares budgets by the same).

Not for our own selection, which takes scores as they are (`kvpolicy.methods.ranking`).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvpolicy.methods.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS, retention_ranks

ALWAYS_KEPT_WORTH = 2.0**20
"""Worth of an always-kept token: beyond any share, also after factors such as norms of values and means over chunks."""

_LEAST_WORTH = 2.0**-100  # softmax underflows to 0, where entries could no longer be told apart


def worth_of_entries(scores: Float[Tensor, "head token"]) -> Float[Tensor, "head token"]:
    """Turn scores into shares of a head that have exactly the order of its ranking.

    The largest numbers are those of the always-kept tokens, which are beyond any share. Entries that would be equal in
    float32 are lowered by single units in the last place, so that they differ and ties go by position whatever sorts
    them.

    Args:
        scores: Logits; higher is kept longer.

    Returns:
        float32 numbers above 0, all different within a head: the entries with the b largest are those that budget b
        keeps (`kvpolicy.methods.ranking.kept_positions`). They are softmax(scores), but for ties and always-kept
        tokens.

    Raises:
        InputError: If there are fewer tokens than are always kept, or a score between them is NaN.
    """
    num_tokens = scores.shape[1]
    order = retention_ranks(scores).argsort(dim=1)
    worth = scores.float().nan_to_num(nan=torch.finfo(torch.float32).min).softmax(dim=1).clamp(min=_LEAST_WORTH)
    worth[:, :NUM_SINK_TOKENS] = ALWAYS_KEPT_WORTH
    worth[:, num_tokens - NUM_RECENT_TOKENS :] = ALWAYS_KEPT_WORTH
    # The bits of positive floats, read as integers, have the order of the floats, and neighbours differ by 1.
    bits = worth.gather(1, order).view(torch.int32)
    places = torch.arange(num_tokens, dtype=torch.int32, device=scores.device)
    least = torch.tensor(_LEAST_WORTH).view(torch.int32).to(bits)
    bits = bits.maximum(least + num_tokens - places)  # so that nothing falls below the least
    falling = (bits + places).cummin(dim=1).values - places
    return torch.empty_like(worth).scatter_(1, order, falling.view(torch.float32))
