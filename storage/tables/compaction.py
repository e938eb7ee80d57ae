"""Keeping a Lance table quick: few files in place of the many that single appends leave, and indexes on columns.

Every append leaves a file, a look-up opens them all, and every commit lists them all. Merging is a commit like an
append: rows keep their place in the order of commits, earlier versions their files and indexes. A process that is
killed in the middle leaves nothing but an unused file, and of two that merge at once one gives way.

Not for when it happens: `storage.tables.lance_table` does it as part of appending, and `kvp compact` by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

_ROWS_OF_A_FILE = 1 << 20
_ROWS_WORTH_AN_INDEX = 1 << 16  # reading all of a column of so many takes a few milliseconds
_LARGEST_REST = 4  # a part of a table; so much may be outside of its indexes


def merge_files(dataset: Any, *, all_files: bool) -> None:
    """Merge neighbouring files of less than a million rows.

    Args:
        dataset: a Lance dataset at its latest version, which is then at the new one.
        all_files: merge all; else leave those alone that are larger than everything after them, so that over its life
            a row is written again at most once each time that the table has doubled.
    """
    fragments = dataset.get_fragments()
    settled = 0 if all_files else num_settled([fragment.metadata.physical_rows for fragment in fragments])
    dataset.optimize.compact_files(
        target_rows_per_fragment=_ROWS_OF_A_FILE,
        excluded_fragment_ids=[fragment.fragment_id for fragment in fragments[:settled]],
    )


def num_settled(rows: Sequence[int]) -> int:
    """Count the first files that are larger than all after them together."""
    after = [0, *accumulate(reversed(rows))]
    return next((index for index, count in enumerate(rows) if count <= after[len(rows) - 1 - index]), len(rows))


def bring_indexes_up(dataset: Any, columns: Sequence[str], *, all_rows: bool) -> None:
    """Index columns for look-ups of single values. Rows outside of an index are found too, by reading them.

    Args:
        dataset: a Lance dataset at its latest version.
        columns: the columns.
        all_rows: index whatever is not; else only when it has become a good part of the table.
    """
    rows = dataset.count_rows()
    if rows < _ROWS_WORTH_AN_INDEX:
        return
    indexed = {index.field_names[0]: index.num_rows_indexed for index in dataset.describe_indices()}
    for column in columns:
        rest = rows - indexed.get(column, 0)
        if rest * _LARGEST_REST > rows or (all_rows and rest):
            dataset.create_scalar_index(column, "BTREE", replace=True)
