"""A fragment before it is written: its content with digests, its name, and the rows that will commit it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpolicy.digests import digest_json
from storage.errors import StorageError
from storage.traces.fragment_content import FragmentTensors, Span, head_digests, sample_digest
from storage.traces.layout import FORMAT_VERSION
from storage.traces.manifest import TraceRow, TraceSample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class FragmentDraft:
    """What is about to be written; make one with `FragmentDraft.of`.

    Attributes:
        collection: key of the collection.
        model_digest: digest of the model that made the traces.
        samples: the samples, in the order of their tokens.
        spans: tokens of each.
        tensors: their traces.
        heads: (sample, head, 32) bytes, the BLAKE3 digest of each head of each sample.
        sample_digests: digest of each sample's content.
    """

    collection: str
    model_digest: str
    samples: Sequence[TraceSample]
    spans: Sequence[Span]
    tensors: FragmentTensors
    heads: np.ndarray[Any, Any]
    sample_digests: Sequence[str]

    @classmethod
    def of(
        cls,
        *,
        collection: str,
        model_digest: str,
        samples: Sequence[TraceSample],
        keys: torch.Tensor,
        values: torch.Tensor,
        importance: torch.Tensor,
    ) -> FragmentDraft:
        """Check and digest what `storage.traces.store.TraceStore.write_fragment` is given.

        Raises:
            StorageError: if the arguments disagree.
        """
        spans = _spans(samples, num_tokens=keys.shape[1] if keys.ndim > 1 else 0)
        tensors = FragmentTensors.from_torch(keys, values, importance)
        heads = head_digests(tensors.blocks, spans)
        digests = [
            sample_digest(sample.sample_id, tensors.logical_dtype, tensors.dims, sample.context_tokens, heads[index])
            for index, sample in enumerate(samples)
        ]
        return cls(
            collection=collection,
            model_digest=model_digest,
            samples=samples,
            spans=spans,
            tensors=tensors,
            heads=heads,
            sample_digests=digests,
        )

    @property
    def sample_ids(self) -> list[str]:
        """Ids of the samples."""
        return [sample.sample_id for sample in self.samples]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's traces, every head."""
        return sum(int(block.nbytes) for block in self.tensors.blocks) // self.spans[-1][1]

    @property
    def digest(self) -> str:
        """Digest of the content."""
        return digest_json([list(pair) for pair in zip(self.sample_ids, self.sample_digests, strict=True)])

    def name(self, layout: Sequence[Any]) -> str:
        """Return the fragment's id, which stands for its content and for how it is laid out."""
        return digest_json([FORMAT_VERSION, self.collection, self.digest, *layout])[:32]

    def attributes(self) -> dict[str, Any]:
        """Return what the fragment says of itself."""
        return {
            "format_version": FORMAT_VERSION,
            "collection": self.collection,
            "model_digest": self.model_digest,
            "digest": self.digest,
            "samples": [
                {**asdict(sample), "start": start, "digest": digest}
                for sample, (start, _), digest in zip(self.samples, self.spans, self.sample_digests, strict=True)
            ],
        }

    def rows(self, fragment_id: str, metadata_digest: str) -> Iterator[TraceRow]:
        """Return the rows of the manifest that will commit it.

        Args:
            fragment_id: its name.
            metadata_digest: digest of its metadata documents.
        """
        for sample, (start, _), digest in zip(self.samples, self.spans, self.sample_digests, strict=True):
            yield TraceRow(
                **asdict(sample),
                collection=self.collection,
                model_digest=self.model_digest,
                fragment_id=fragment_id,
                start=start,
                sample_digest=digest,
                metadata_digest=metadata_digest,
            )


def _spans(samples: Sequence[TraceSample], *, num_tokens: int) -> list[Span]:
    if not samples:
        raise StorageError("no samples to write: expected at least one")
    ids = [sample.sample_id for sample in samples]
    if len(set(ids)) < len(ids):
        raise StorageError(f"a sample id occurs twice among {', '.join(ids[:5])}: expected each once")
    lengths = [sample.context_tokens for sample in samples]
    if min(lengths) < 1 or sum(lengths) != num_tokens:
        raise StorageError(
            f"samples have {sum(lengths)} context tokens and keys {num_tokens}: expected the same, each >= 1"
        )
    stops = list(accumulate(lengths))
    return list(zip([0, *stops[:-1]], stops, strict=True))
