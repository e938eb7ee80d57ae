"""The shape of a language model as the rest of the library sees it, and the names of its KV heads."""

from dataclasses import dataclass

from kvpolicy.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Counts that every tensor layout follows.

    KV heads are numbered layer-major over the whole model: head = layer * num_kv_heads + kv_head.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int

    def __post_init__(self) -> None:
        """Check that query heads divide evenly over KV heads.

        Raises:
            InputError: If they do not, or if a count is not positive.
        """
        for name in ("num_layers", "num_query_heads", "num_kv_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise InputError(f"model shape: {name} is {getattr(self, name)}, expected at least 1")
        if self.num_query_heads % self.num_kv_heads:
            raise InputError(
                f"model shape: {self.num_query_heads} query heads do not divide over {self.num_kv_heads} KV heads"
            )

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
