"""Fragments of the trace store on disk: one Zarr v3 group each, written once, in whole shards.

A shard holds one KV head over all tokens of the fragment, so that reading a head is a sequential read. zarr has no
bfloat16, so its bits are stored as uint16 and `logical_dtype` says so.

Two guards against damage. Every chunk and every shard index carries a crc32c; but the Rust codec pipeline (zarrs
0.2.3) checks a chunk's only when it decodes a whole shard, and reading one sample is not that. So the array
`head_digests` holds the sha256 of each head of each sample, and every read is compared with it.

Not for which fragments count: that is the manifest's say.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.digests import digest_bytes, digest_json
from storage.errors import StorageError
from storage.tables import one_line

if TYPE_CHECKING:
    import torch

_DIGESTS = "head_digests"
ARRAYS = ("keys", "values", "importance")
LOGICAL_DTYPES = ("bfloat16", "float16", "float32")
_STORED_DTYPES = {"bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
_HASH_THREADS = 4
_REMEDY = "run `kvp traces verify --discard`, then collect it again"

# zarr's configuration is global to the process, so it is changed only under this lock, and only while an array is
# made or opened: that is when zarr binds the codec pipeline.
_ZARR_CONFIG = threading.Lock()

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
            StorageError: if shapes or types disagree, or importance is not finite.
        """
        import torch

        dtype = str(keys.dtype).removeprefix("torch.")
        if dtype not in LOGICAL_DTYPES or values.dtype != keys.dtype:
            raise StorageError(
                f"keys are {keys.dtype} and values {values.dtype}: expected both in one of {', '.join(LOGICAL_DTYPES)}"
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
        return cls(
            keys=_to_stored(keys), values=_to_stored(values), importance=_to_stored(importance), logical_dtype=dtype
        )

    @property
    def dims(self) -> tuple[int, int]:
        """Dimensions of keys and of values."""
        return self.keys.shape[2], self.values.shape[2]


def head_digests(
    keys: np.ndarray[Any, Any], values: np.ndarray[Any, Any], importance: np.ndarray[Any, Any], spans: Sequence[Span]
) -> np.ndarray[Any, Any]:
    """Return the sha256 of each head of each sample as (sample, head, 32) bytes.

    Args:
        keys: (head, token, dim) as stored.
        values: (head, token, dim) as stored.
        importance: (head, token).
        spans: tokens of each sample.
    """
    num_heads = keys.shape[0]
    digests = np.empty((len(spans), num_heads, 32), np.uint8)

    def hash_head(head: int) -> None:
        for index, (start, stop) in enumerate(spans):
            hasher = hashlib.sha256()
            for array in (keys, values, importance):
                hasher.update(np.ascontiguousarray(array[head, start:stop]).data)
            digests[index, head] = np.frombuffer(hasher.digest(), np.uint8)

    if num_heads == 1:
        hash_head(0)
    else:
        with ThreadPoolExecutor(_HASH_THREADS) as pool:  # hashlib lets go of the interpreter for large buffers
            list(pool.map(hash_head, range(num_heads)))
    return digests


def sample_digest(
    sample_id: str, logical_dtype: str, dims: tuple[int, int], tokens: int, heads: np.ndarray[Any, Any]
) -> str:
    """Return the digest of a sample's logical content from its (head, 32) head digests."""
    header = {"sample_id": sample_id, "dtype": logical_dtype, "dims": list(dims), "tokens": tokens, "heads": len(heads)}
    return digest_bytes(digest_json(header).encode() + heads.tobytes())


def write(
    folder: Path,
    tensors: FragmentTensors,
    digests: np.ndarray[Any, Any],
    attributes: Mapping[str, Any],
    chunk_tokens: int,
) -> None:
    """Write a fragment into a new folder; on failure nothing of it is left.

    Args:
        folder: the folder.
        tensors: its tensors.
        digests: (sample, head, 32) from `head_digests`.
        attributes: ``logical_dtype``, ``samples`` (each with its ``start``) and whatever else describes it.
        chunk_tokens: tokens of a chunk, at most.

    Raises:
        StorageError: if it cannot be written.
    """
    tokens = tensors.keys.shape[1]
    # Even chunks: 1,100 tokens become 2 x 550, not 1,024 and a chunk that is mostly padding.
    num_chunks = math.ceil(tokens / chunk_tokens)
    chunk = math.ceil(tokens / num_chunks)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _zarrs() as zarr:
            group = zarr.create_group(str(folder), zarr_format=3, attributes=dict(attributes))
            arrays = {
                name: _create_array(group, name, getattr(tensors, name), chunk, num_chunks * chunk) for name in ARRAYS
            }
            # No checksum: these bytes are checked against the content that they describe, one head of one sample each.
            arrays[_DIGESTS] = group.create_array(
                _DIGESTS, shape=digests.shape, dtype="uint8", chunks=digests.shape, compressors=None, fill_value=0
            )
        for name, array in arrays.items():
            array[...] = digests if name == _DIGESTS else getattr(tensors, name)
        for name in ARRAYS:
            for head in range(tensors.keys.shape[0]):
                if not _shard(folder, name, head).is_file():
                    raise ValueError(f"{name} of head {head} are NaN throughout")
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise StorageError(f"cannot write traces to {folder}: {one_line(error)}; nothing was committed") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _create_array(group: Any, name: str, content: np.ndarray[Any, Any], chunk: int, shard: int) -> Any:
    from zarr.codecs import Crc32cCodec

    rest = content.shape[2:]
    return group.create_array(
        name,
        shape=content.shape,
        dtype=content.dtype,
        chunks=(1, chunk, *rest),
        shards=(1, shard, *rest),
        filters=None,
        compressors=Crc32cCodec(),
        # zarrs 0.2.3 leaves out shards that equal the fill value, whatever `write_empty_chunks` says. No head of a
        # working model is all NaN, so with this value an absent shard is a loss and never zeros.
        fill_value=np.iinfo(np.uint16).max if content.dtype == np.uint16 else np.nan,
        dimension_names=("head", "token", "dim")[: content.ndim],
    )


def metadata_digest(folder: Path) -> str:
    """Digest a fragment's metadata documents, which no checksum covers.

    Raises:
        StorageError: if one is missing.
    """
    paths = [folder / "zarr.json", *(folder / name / "zarr.json" for name in (*ARRAYS, _DIGESTS))]
    try:
        return digest_json([digest_bytes(path.read_bytes()) for path in paths])
    except OSError as error:
        raise StorageError(f"fragment at {folder} is not whole: {error.strerror}: {error.filename}") from error


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """An opened fragment.

    Attributes:
        folder: where it lies.
        logical_dtype: what the bits of keys and values mean.
        num_heads: KV heads.
        num_tokens: tokens of all its samples.
        dims: dimensions of keys and of values.
        sample_index: first token of a sample -> its place among the samples.
        arrays: name -> Zarr array.
    """

    folder: Path
    logical_dtype: str
    num_heads: int
    num_tokens: int
    dims: tuple[int, int]
    sample_index: Mapping[int, int]
    arrays: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path, *, check_all: bool = False) -> Fragment:
        """Open a fragment.

        Args:
            folder: its folder.
            check_all: read with zarr's own codecs, which are slower but check every chunk that they touch.

        Raises:
            StorageError: if it is missing or its metadata is damaged.
        """
        try:
            with _zarrs(enabled=not check_all) as zarr:
                group = zarr.open_group(str(folder), mode="r", zarr_format=3)
                arrays = {name: group[name] for name in (*ARRAYS, _DIGESTS)}
            dtype = str(group.attrs["logical_dtype"])
            heads, tokens, dim = arrays["keys"].shape
            if arrays["keys"].dtype != _STORED_DTYPES[dtype] or arrays["importance"].shape != (heads, tokens):
                raise ValueError(f"its arrays are not those of {dtype} traces")
            return cls(
                folder=folder,
                logical_dtype=dtype,
                num_heads=heads,
                num_tokens=tokens,
                dims=(dim, arrays["values"].shape[2]),
                sample_index={sample["start"]: index for index, sample in enumerate(group.attrs["samples"])},
                arrays=arrays,
            )
        except Exception as error:  # zarr raises many types on damaged metadata
            raise StorageError(f"fragment {folder.name} at {folder} cannot be opened: {one_line(error)}") from error

    def read(self, name: str, heads: Span, tokens: Span) -> np.ndarray[Any, Any]:
        """Read a block of one array as stored: (head, token) or (head, token, dim).

        Raises:
            StorageError: if a shard is missing or damaged.
        """
        # zarr reads a missing shard as zeros, so look first.
        for head in range(*heads):
            if not _shard(self.folder, name, head).is_file():
                raise StorageError(f"fragment {self.folder.name} lost {name} of head {head}; {_REMEDY}")
        try:
            block: np.ndarray[Any, Any] = self.arrays[name][slice(*heads), slice(*tokens)]
        except Exception as error:  # the Rust side raises RuntimeError, zarr ValueError and others
            raise StorageError(
                f"fragment {self.folder.name}: {name} of heads {heads[0]}-{heads[1] - 1} cannot be read:"
                f" {one_line(error)}; {_REMEDY}"
            ) from error
        return block

    def stored_digests(self, start: int) -> np.ndarray[Any, Any]:
        """Return the (head, 32) digests of the sample that begins at a token.

        Raises:
            StorageError: if no sample begins there or the digests are missing.
        """
        try:
            if not (self.folder / _DIGESTS / "c" / "0" / "0" / "0").is_file():
                raise FileNotFoundError(f"{_DIGESTS} is missing")
            stored: np.ndarray[Any, Any] = self.arrays[_DIGESTS][self.sample_index[start]]
        except Exception as error:
            raise StorageError(
                f"fragment {self.folder.name} cannot be checked: {one_line(error)}; {_REMEDY}"
            ) from error
        return stored


def _shard(folder: Path, name: str, head: int) -> Path:
    """Return the file of one head of one array."""
    return folder / name / "c" / str(head) / "0" / ("0" if name != "importance" else "")


def to_torch(stored: np.ndarray[Any, Any], logical_dtype: str) -> torch.Tensor:
    """Return stored bits as a tensor of their logical type, without a copy."""
    import torch

    tensor = torch.from_numpy(stored)
    return tensor.view(torch.bfloat16) if logical_dtype == "bfloat16" else tensor


def _to_stored(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    stored: np.ndarray[Any, Any] = tensor.numpy()
    return stored


@contextmanager
def _zarrs(*, enabled: bool = True) -> Iterator[Any]:
    """Give zarr with the Rust codec pipeline, whose whole-shard writes are 5-10 times as fast as zarr's own."""
    import zarr

    pipeline = "zarrs.ZarrsCodecPipeline" if enabled else "zarr.core.codec_pipeline.BatchedCodecPipeline"
    with _ZARR_CONFIG, zarr.config.set({"codec_pipeline.path": pipeline, "codec_pipeline.strict": True}):
        yield zarr
