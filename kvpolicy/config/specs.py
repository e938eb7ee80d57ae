"""The shape of a language model as the rest of the library sees it, and the names of its KV heads."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpolicy.config.settings import Positive, Settings


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Settings):
    """Counts that every tensor layout follows.

    KV heads are numbered layer-major over the whole model: head = layer * num_kv_heads + kv_head.
    """

    place = "model shape"

    num_layers: Positive
    num_query_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    max_positions: Positive

    def conflicts(self) -> Iterator[str]:
        """Say whether query heads do not divide evenly over KV heads."""
        if self.num_query_heads % self.num_kv_heads:
            yield f"{self.num_query_heads} query heads do not divide over {self.num_kv_heads} KV heads"

    @property
    def num_heads(self) -> int:
        """KV heads of the whole model: one policy each."""
        return self.num_layers * self.num_kv_heads

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_query_heads // self.num_kv_heads

    def head_name(self, head: int) -> str:
        """Name of a KV head, such as `L03.H1`."""
        layer, kv_head = divmod(head, self.num_kv_heads)
        return f"L{layer:02d}.H{kv_head}"
