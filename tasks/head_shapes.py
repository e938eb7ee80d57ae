"""What distinguishes the heads of a model, from the importance of held-out traces, as rows of the catalog."""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from kvpolicy.analysis.heads import HeadShapes, head_shapes
from storage.home import Home
from storage.traces.store import TraceStore
from tasks.framework.references import SnapshotRef
from tasks.inputs.stored_traces import snapshot_rows


def read_head_shapes(home: Home, snapshot: SnapshotRef, *, split: str) -> HeadShapes:
    """Shapes of all heads on the traces of a split.

    Raises:
        InputError: If the snapshot has no traces of the split.
        StorageError: If they cannot be read.
    """
    store = TraceStore(home.traces)
    rows = [row for row in snapshot_rows(store, snapshot) if row.split == split]
    return head_shapes([store.read(row, slice(None)).importance for row in rows])


def shape_of_head(shapes: HeadShapes, head: int) -> dict[str, float | None]:
    """Columns of the table `heads`."""
    names = ("zipf_slope", "effective_tokens", "rank_deviation")
    return {name: _defined(float(getattr(shapes, name)[head])) for name in names}


def head_pair_rows(shapes: HeadShapes) -> Iterator[dict[str, Any]]:
    """Rows of the table `head_pairs`, without the policy set."""
    table = shapes.rank_correlation.tolist()
    for a, b in combinations(range(len(table)), 2):
        yield {"head_a": a, "head_b": b, "spearman": _defined(table[a][b]), "n": shapes.num_samples}


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
