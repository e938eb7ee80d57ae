"""What a fragment holds: tensors as they are stored, and the digests by which their content is known.

Not for how they lie in a place (`storage.traces.fragments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpolicy.digests import digest_bytes, digest_json
from storage.errors import StorageError

if TYPE_CHECKING:
    import torch

ARRAYS = ("keys", "values", "importance")
# zarr has neither bfloat16 nor float8, so their bits are stored as unsigned integers.
STORED_DTYPES = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(np.uint8),
}
_HASH_THREADS = 4

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class FragmentTensors:
    """What a fragment holds, as it is stored.

    Attributes:
        keys: (head, token, dim) bits of the keys.
        values: (head, token, dim) bits of the values.
        importance: (head, token) float32.
        logical_dtype: what the bits of keys and values mean.
    """

    keys: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    importance: np.ndarray[Any, Any]
    logical_dtype: str

    @classmethod
    def from_torch(cls, keys: torch.Tensor, values: torch.Tensor, importance: torch.Tensor) -> FragmentTensors:
        """Take torch tensors of the shapes above.

        Raises:
            StorageError: if shapes or types disagree, a head is all fill value, or importance is not finite.
        """
        import torch

        dtype = str(keys.dtype).removeprefix("torch.")
        if dtype not in STORED_DTYPES or values.dtype != keys.dtype:
            raise StorageError(
                f"keys are {keys.dtype} and values {values.dtype}: expected both in one of {', '.join(STORED_DTYPES)}"
            )
        if keys.ndim != 3 or values.ndim != 3 or not keys.shape[:2] == values.shape[:2] == importance.shape:
            raise StorageError(
                f"keys {tuple(keys.shape)}, values {tuple(values.shape)}, importance {tuple(importance.shape)}:"
                " expected (head, token, dim) twice and (head, token)"
            )
        if 0 in keys.shape or 0 in values.shape:
            raise StorageError(f"keys {tuple(keys.shape)}, values {tuple(values.shape)}: expected no empty dimension")
        if importance.dtype != torch.float32 or not bool(torch.isfinite(importance).all()):
            raise StorageError(f"importance is {importance.dtype}: expected finite float32 numbers")
        stored = cls(
            keys=_to_stored(keys), values=_to_stored(values), importance=_to_stored(importance), logical_dtype=dtype
        )
        for name in ("keys", "values"):
            content = getattr(stored, name)
            for head in range(len(content)):
                if is_fill(content[head]):
                    raise StorageError(f"{name} of head {head} are NaN throughout; nothing was committed")
        return stored

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions of keys and of values."""
        return self.keys.shape[2], self.values.shape[2]

    @property
    def blocks(self) -> list[np.ndarray[Any, Any]]:
        """The arrays in the order of `ARRAYS`."""
        return [getattr(self, name) for name in ARRAYS]


def fill_value(dtype: np.dtype[Any]) -> Any:
    """Return what an absent shard reads as.

    zarrs 0.2.3 leaves out shards that equal the fill value, whatever `write_empty_chunks` says. No head of a working
    model is all NaN, so with this value an absent shard is a loss and never content.
    """
    return np.iinfo(dtype).max if np.issubdtype(dtype, np.unsignedinteger) else np.nan


def is_fill(block: np.ndarray[Any, Any]) -> bool:
    """Whether a block is what an absent shard reads as."""
    fill = fill_value(block.dtype)
    # The first number tells nearly always; only a suspicious one is worth a look at them all.
    return all(np.array_equal(part, np.full_like(part, fill), equal_nan=True) for part in (block.flat[:1], block))


def head_digests(blocks: Sequence[np.ndarray[Any, Any]], spans: Sequence[Span]) -> np.ndarray[Any, Any]:
    """Return the BLAKE3 digest of each head of each sample as (sample, head, 32) bytes.

    Args:
        blocks: keys and values (head, token, dim) and importance (head, token), as stored.
        spans: tokens of each sample.
    """
    from blake3 import blake3  # two to three times as fast as sha256, and every byte that is read goes through it

    num_heads = len(blocks[0])
    digests = np.empty((len(spans), num_heads, 32), np.uint8)

    def hash_head(head: int) -> None:
        for index, (start, stop) in enumerate(spans):
            hasher = blake3()
            for array in blocks:
                hasher.update(np.ascontiguousarray(array[head, start:stop]).view(np.uint8).data)
            digests[index, head] = np.frombuffer(hasher.digest(), np.uint8)

    if num_heads == 1:
        hash_head(0)
    else:
        with ThreadPoolExecutor(_HASH_THREADS) as pool:  # blake3 lets go of the interpreter for large buffers
            list(pool.map(hash_head, range(num_heads)))
    return digests


def sample_digest(
    sample_id: str, logical_dtype: str, dims: tuple[int, int], tokens: int, heads: np.ndarray[Any, Any]
) -> str:
    """Return the digest of a sample's logical content from its (head, 32) head digests."""
    header = {"sample_id": sample_id, "dtype": logical_dtype, "dims": list(dims), "tokens": tokens, "heads": len(heads)}
    return digest_bytes(digest_json(header).encode() + heads.tobytes())


def to_torch(stored: np.ndarray[Any, Any], logical_dtype: str) -> torch.Tensor:
    """Return stored bits as a tensor of their logical type, without a copy."""
    import torch

    tensor = torch.from_numpy(stored)
    dtype: torch.dtype = getattr(torch, logical_dtype)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _to_stored(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    tensor = tensor.detach().cpu().contiguous()
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
    stored: np.ndarray[Any, Any] = (tensor if bits is None else tensor.view(bits)).numpy()
    return stored
