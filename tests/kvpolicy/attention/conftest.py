"""What the attention tests share: how much memory tensors hold at once."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make, and keeps the largest sum of bytes that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


@contextmanager
def _live_bytes() -> Iterator[LiveBytes]:
    with LiveBytes() as counter:
        yield counter


@pytest.fixture
def live_bytes() -> Callable[[], AbstractContextManager[LiveBytes]]:
    return _live_bytes
