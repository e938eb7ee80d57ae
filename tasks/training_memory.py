"""How much memory training takes: an estimate from above, by which several groups of heads share a GPU.

Where it is too low all the same, training takes a step again with fewer heads at a time.
"""

from kvpolicy.policies.agent import PAPER_TABLE_ROWS
from kvpolicy.training.policy_training import TrainConfig

_FLOAT_BYTES = 4
_CONTEXT_BYTES = 2**30  # what CUDA and its libraries take for a process
_COPIES_OF_WEIGHTS = 6  # with their gradients, two moments of Adam, the average that is kept, and one on its way
_BATCHES_AT_ONCE = 3  # in use, and read ahead
_WIDTHS_KEPT_PER_TOKEN = 24  # activations for the way back, and those on it


def training_bytes(config: TrainConfig, *, num_heads: int, head_dim: int, longest_tokens: int) -> int:
    """Memory that training a group of heads takes on a device.

    Args:
        config: How they are trained.
        num_heads: Of the group.
        head_dim: Of keys and values.
        longest_tokens: Context of the longest sequence.
    """
    width, position = config.agent.width, config.agent.position_dim
    weights = 2 * head_dim * width + (2 * width + position) * width + width * width
    if config.agent.position == "table":
        weights += PAPER_TABLE_ROWS * position
    tokens = config.batch_sequences * longest_tokens
    batch = tokens * 2 * head_dim * _BATCHES_AT_ONCE
    activations = tokens * width * _WIDTHS_KEPT_PER_TOKEN
    return _CONTEXT_BYTES + num_heads * _FLOAT_BYTES * (_COPIES_OF_WEIGHTS * weights + batch + activations)
