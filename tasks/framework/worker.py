"""What a worker keeps to when a part of a flow is sent to it: the flow's code, and its number of threads.

Kept in Prefect's tags, as the purpose is (`tasks.framework.purpose`): they reach every kind of worker. A part that runs
in the flow's own process was sent nowhere and finds nothing to keep to.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.context import TagsContext

from kvpolicy.errors import InputError

_MARK = "kvp.flow:"
_SHOWN = 12


@contextmanager
def sending(code: str, num_threads: int) -> Iterator[None]:
    """Tell the workers of all tasks that the block submits what to keep to.

    Args:
        code: Fingerprint of the code that the tasks run.
        num_threads: Of one computation in the flow's process: sums in float32 are the same only with the same number.
    """
    with TagsContext(current_tags=TagsContext.get().current_tags | {f"{_MARK}{code}:{num_threads}"}):
        yield


def keep_to_flow(code: str) -> None:
    """In a worker, compute as the flow would, or refuse to.

    Args:
        code: Fingerprint of the code that this process runs.

    Raises:
        InputError: If the flow runs other code.
    """
    mark = next((tag for tag in TagsContext.get().current_tags if tag.startswith(_MARK)), None)
    if mark is None:
        return
    expected, _, num_threads = mark.removeprefix(_MARK).partition(":")
    if code != expected:
        raise InputError(
            f"a worker on {os.uname().nodename} runs other code ({code[:_SHOWN]}) than the flow ({expected[:_SHOWN]}): "
            "install the same release there, and restart the workers"
        )
    import torch

    os.environ["OMP_NUM_THREADS"] = num_threads  # what the run records
    if torch.get_num_threads() != int(num_threads):
        torch.set_num_threads(int(num_threads))
