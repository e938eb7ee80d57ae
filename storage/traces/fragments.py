"""Fragments of the trace store: one Zarr v3 group each, written once, one object for each KV head.

A head lies in one piece over all tokens of the fragment, so that reading it is a sequential read: as it is in memory,
or compressed in a shard of smaller chunks, so that a part of it can be read. The group's own document is put last:
with it the fragment is there, and without it there is nothing. Writing a fragment again, or twice at once, puts the
same bytes under the same names.

The array `head_digests` holds the BLAKE3 digest of each head of each sample, and every read is compared with it.
Compressed chunks have bytes beside their content, padding among them, so they carry a crc32c as well; zarrs (0.2.3)
checks it when it decodes a whole shard, and a shard is whole only if its array is padded to it.

Not for which fragments count: that is the manifest's say.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpolicy.digests import digest_bytes, digest_json
from kvpolicy.errors import first_line
from storage.errors import StorageError, remedy_for
from storage.traces.fragment_content import ARRAYS, STORED_DTYPES, FragmentTensors, Span, fill_value
from storage.traces.layout import FRAGMENTS
from storage.traces.places import Place

DOCUMENT = "zarr.json"
_DIGESTS = "head_digests"
_HEADS_AT_ONCE = 8
_DOCUMENTS = (*(f"{name}/{DOCUMENT}" for name in (*ARRAYS, _DIGESTS)), DOCUMENT)  # the group's own last
REMEDY = "run `kvp traces verify --discard`, then collect it again"

# zarr's configuration is global to the process, so it is changed only under this lock, and only while an array is
# made or opened: that is when zarr binds the codec pipeline.
_ZARR_CONFIG = threading.Lock()
_PIPELINE = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True}


def path_of(fragment_id: str) -> str:
    """Return where a fragment lies in its place."""
    return f"{FRAGMENTS}/{fragment_id}"


def is_there(place: Place, fragment_id: str) -> bool:
    """Whether a fragment is published in a place.

    Raises:
        StorageError: if the place cannot be reached.
    """
    return place.exists(f"{path_of(fragment_id)}/{DOCUMENT}")


def touch(place: Place, fragment_id: str) -> None:
    """Refresh the modification time of a fragment, so that garbage collection keeps it.

    Raises:
        StorageError: if the place cannot be reached, or the fragment is gone.
    """
    name = f"{path_of(fragment_id)}/{DOCUMENT}"
    content = place.read(name)
    if content is None:
        raise StorageError(f"fragment {place.join(name)} was removed meanwhile; collect it again")
    place.write(name, content)


def remove(place: Place, fragment_id: str) -> None:
    """Remove a fragment; at no moment is there half of one.

    Raises:
        StorageError: if it cannot be removed.
    """
    place.remove(path_of(fragment_id), first=DOCUMENT)


def write(
    place: Place,
    fragment_id: str,
    tensors: FragmentTensors,
    digests: np.ndarray[Any, Any],
    attributes: Mapping[str, Any],
    *,
    chunk_tokens: int,
    compression: str,
) -> str:
    """Write a fragment, and return the digest of its metadata documents.

    Args:
        place: the store's place.
        fragment_id: its name, which stands for its content.
        tensors: its tensors.
        digests: (sample, head, 32) of them.
        attributes: ``samples`` (each with its ``start``) and whatever else describes it.
        chunk_tokens: tokens of a chunk, at most.
        compression: one of `kvpolicy.names.COMPRESSIONS`.

    Raises:
        StorageError: if it cannot be written; then it is not there, and what lies there is garbage.
    """
    path = path_of(fragment_id)
    try:
        documents = _documents(tensors, digests, attributes, chunk_tokens=chunk_tokens, compression=compression)
        for name in _DOCUMENTS[:-1]:
            place.write(f"{path}/{name}", documents[name])
        store = place.writer()
        with _zarrs() as zarr:
            arrays = {name: zarr.open_array(store, path=f"{path}/{name}", mode="r+") for name in (*ARRAYS, _DIGESTS)}
        arrays[_DIGESTS][...] = digests
        for name, content in zip(ARRAYS, tensors.blocks, strict=True):
            _fill(arrays[name], content)
        place.write(f"{path}/{DOCUMENT}", documents[DOCUMENT])
    except StorageError as error:
        raise StorageError(f"cannot write traces: {error}; nothing was committed") from error
    except Exception as error:  # the Rust side raises RuntimeError, zarr many types
        raise StorageError(
            f"cannot write traces to {place.join(path)}: {first_line(error)}{remedy_for(error)}; nothing was committed"
        ) from error
    return _digest_documents(documents)


def _fill(array: Any, content: np.ndarray[Any, Any]) -> None:
    """Write (head, token, ...) content some heads at a time: whole shards, padded where the tokens do not fill them."""
    tokens = content.shape[1]
    for first in range(0, len(content), _HEADS_AT_ONCE):
        block = content[first : first + _HEADS_AT_ONCE]
        if tokens < array.shape[1]:
            padded = np.full((len(block), *array.shape[1:]), array.fill_value, array.dtype)
            padded[:, :tokens] = block
            block = padded
        array[first : first + len(block)] = block


def _documents(
    tensors: FragmentTensors,
    digests: np.ndarray[Any, Any],
    attributes: Mapping[str, Any],
    *,
    chunk_tokens: int,
    compression: str,
) -> dict[str, bytes]:
    """The metadata documents: name -> content, made in memory, so that they are put in the order that matters."""
    import zarr
    from zarr.storage import MemoryStore

    made: dict[str, Any] = {}
    num_heads, tokens = tensors.keys.shape[:2]
    described = {**attributes, "logical_dtype": tensors.logical_dtype, "num_tokens": tokens}
    group = zarr.create_group(MemoryStore(store_dict=made), zarr_format=3, attributes=described)
    for name, content in zip(ARRAYS, tensors.blocks, strict=True):
        rest = content.shape[2:]
        chunk, shard, codecs = tokens, None, None
        if compression != "none":
            # Even chunks: 1,100 tokens become 2 x 550, not 1,024 and a chunk that is mostly padding.
            num_chunks = math.ceil(tokens / chunk_tokens)
            chunk = math.ceil(tokens / num_chunks)
            shard, codecs = (1, num_chunks * chunk, *rest), _codecs(compression, content.dtype.itemsize)
        group.create_array(
            name,
            shape=(num_heads, tokens if shard is None else shard[1], *rest),
            dtype=content.dtype,
            chunks=(1, chunk, *rest),
            shards=shard,
            filters=None,
            compressors=codecs,
            fill_value=fill_value(content.dtype),
            dimension_names=("head", "token", "dim")[: content.ndim],
        )
    group.create_array(
        _DIGESTS, shape=digests.shape, dtype="uint8", chunks=digests.shape, compressors=None, fill_value=0
    )
    return {name: made[name].to_bytes() for name in _DOCUMENTS}


def _codecs(compression: str, itemsize: int) -> list[Any]:
    from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

    compressors: Mapping[str, list[Any]] = {
        "zstd": [ZstdCodec(level=1)],
        "shuffled_zstd": [BloscCodec(cname="zstd", clevel=1, shuffle="shuffle", typesize=itemsize)],
    }
    return [*compressors[compression], Crc32cCodec()]


def metadata_digest(place: Place, fragment_id: str) -> str:
    """Digest a fragment's metadata documents, which no checksum covers.

    Raises:
        StorageError: if one is missing.
    """
    path = path_of(fragment_id)
    documents = {name: place.read(f"{path}/{name}") for name in _DOCUMENTS}
    missing = [name for name, content in documents.items() if content is None]
    if missing:
        raise StorageError(f"fragment {place.join(path)} is not whole: {', '.join(missing)} missing; {REMEDY}")
    return _digest_documents({name: content or b"" for name, content in documents.items()})


def _digest_documents(documents: Mapping[str, bytes]) -> str:
    return digest_json([digest_bytes(documents[name]) for name in _DOCUMENTS])


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """An opened fragment.

    Attributes:
        fragment_id: its name.
        logical_dtype: what the bits of keys and values mean.
        num_heads: KV heads.
        num_tokens: tokens of all its samples.
        dims: dimensions of keys and of values.
        sample_index: first token of a sample -> its place among the samples.
        digests: (sample, head, 32) bytes, the BLAKE3 digest of each head of each sample.
        arrays: name -> Zarr array.
    """

    fragment_id: str
    logical_dtype: str
    num_heads: int
    num_tokens: int
    dims: tuple[int, int]
    sample_index: Mapping[int, int]
    digests: np.ndarray[Any, Any]
    arrays: Mapping[str, Any]

    @classmethod
    def open(cls, place: Place, fragment_id: str) -> Fragment:
        """Open a fragment.

        Args:
            place: the store's place.
            fragment_id: its name.

        Raises:
            StorageError: if it is missing or its metadata is damaged.
        """
        path = path_of(fragment_id)
        try:
            with _zarrs() as zarr:
                group = zarr.open_group(place.reader(), path=path, mode="r", zarr_format=3)
                arrays = {name: group[name] for name in ARRAYS}
                digests = group[_DIGESTS]
            dtype = str(group.attrs["logical_dtype"])
            heads, padded, dim = arrays["keys"].shape
            if arrays["keys"].dtype != STORED_DTYPES[dtype] or arrays["importance"].shape != (heads, padded):
                raise ValueError(f"its arrays are not those of {dtype} traces")
            return cls(
                fragment_id=fragment_id,
                logical_dtype=dtype,
                num_heads=heads,
                num_tokens=int(group.attrs["num_tokens"]),
                dims=(dim, arrays["values"].shape[2]),
                sample_index={sample["start"]: index for index, sample in enumerate(group.attrs["samples"])},
                digests=digests[...],
                arrays=arrays,
            )
        except Exception as error:  # zarr raises many types on damaged metadata
            raise StorageError(
                f"fragment {place.join(path)} cannot be opened: {first_line(error)}{remedy_for(error) or f'; {REMEDY}'}"
            ) from error

    def read(self, name: str, heads: Span, tokens: Span) -> np.ndarray[Any, Any]:
        """Read a block of one array as stored, (head, token) or (head, token, dim); compare it with `stored_digests`.

        What is missing reads as `storage.traces.fragment_content.fill_value`.

        Raises:
            StorageError: if it cannot be read.
        """
        try:
            block: np.ndarray[Any, Any] = self.arrays[name][slice(*heads), slice(*tokens)]
        except Exception as error:  # the Rust side raises RuntimeError, zarr ValueError and others
            raise StorageError(
                f"fragment {self.fragment_id}: {name} of heads {heads[0]}-{heads[1] - 1} cannot be read:"
                f" {first_line(error)}{remedy_for(error) or f'; {REMEDY}'}"
            ) from error
        return block

    def read_head(self, head: int) -> list[np.ndarray[Any, Any]]:
        """Read keys, values and importance of one head, all of it: (1, token, ...) each.

        Raises:
            StorageError: if it cannot be read, or a checksum is wrong.
        """
        blocks = [self.read(name, (head, head + 1), (0, self.arrays[name].shape[1])) for name in ARRAYS]
        return [block[:, : self.num_tokens] for block in blocks]

    def stored_digests(self, start: int) -> np.ndarray[Any, Any]:
        """Return the (head, 32) digests of the sample that begins at a token.

        Raises:
            StorageError: if no sample begins there.
        """
        if start not in self.sample_index:
            raise StorageError(f"fragment {self.fragment_id} has no sample that begins at token {start}; {REMEDY}")
        stored: np.ndarray[Any, Any] = self.digests[self.sample_index[start]]
        return stored


@contextmanager
def _zarrs() -> Iterator[Any]:
    """Give zarr with the Rust codec pipeline, whose writes are 5-10 times as fast as zarr's own."""
    import zarr

    # obstore and zarrs are two Rust modules, so zarrs opens a connection pool of its own, and says so each time.
    warnings.filterwarnings("ignore", "Successfully reconstructed a store", RuntimeWarning)
    with _ZARR_CONFIG, zarr.config.set(_PIPELINE):
        yield zarr
