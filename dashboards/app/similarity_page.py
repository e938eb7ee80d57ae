"""Page: rank correlations between KV heads, with heads that rank alike beside each other."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster

from dashboards.app.choosing import lineage_link, short_id
from dashboards.app.content import Nothing, Page
from dashboards.app.records import Records
from dashboards.app.selection import Selection
from dashboards.figures.pairs import Correlations, draw_matrix, means_table
from dashboards.grouping import grouped
from dashboards.rendering.formats import number
from dashboards.rendering.table import Table, table

_ORDERS = [("clustered", "heads that rank alike together"), ("layers", "by layer")]
_LEVELS = ("0.9", "0.8", "0.7", "0.6", "0.5")


def similarity_page(records: Records, selection: Selection) -> Page:
    """The page.

    Raises:
        Nothing: no policy set has been trained, or it has a single head.
    """
    policy_sets = records.policy_sets_with_pairs()
    if not policy_sets:
        raise Nothing("No policies have been trained in this home yet.", "kvp train --preset smoke")
    options = [(key, f"{name} ({short_id(key)})") for key, name in policy_sets]
    policy_set = selection.one("policy", "Held-out traces of", options)
    pairs = records.of_policy_set("head_pairs", policy_set)
    if not pairs:
        raise Nothing("This policy set has a single head, so there is nothing to compare.", "")
    heads = {row["head"]: row["head_name"] for row in records.of_policy_set("heads", policy_set)}
    correlations = Correlations.of_rows(pairs, heads)
    order = selection.one("order", "Order", _ORDERS)
    tree = correlations.tree()
    # By default the first level at which any heads form a group.
    default = next((one for one in _LEVELS if len(_groups(tree, float(one))) < len(correlations.names)), _LEVELS[-1])
    level = selection.one("level", "Groups of heads with a correlation from", _LEVELS, default=default)
    groups = _groups(tree, float(level))
    return Page(
        template="figures.html",
        content={
            "title": "Head similarity",
            "lead": "Spearman's rank correlation of two heads' importance: at 1 one policy would do for both.",
            "figures": [draw_matrix(correlations, tree if order == "clustered" else None)],
            "tables": [_group_table(correlations, groups, level), means_table(correlations)],
            "origin": [lineage_link(policy_set)],
        },
    )


def _groups(tree: NDArray[np.float64], level: float) -> list[list[int]]:
    """Heads in clusters whose mean correlation is at least a level, the largest first."""
    numbers = fcluster(tree, t=1 - level + 1e-9, criterion="distance")
    members = grouped(range(len(numbers)), lambda head: int(numbers[head]))
    return sorted(members.values(), key=lambda heads: (-len(heads), heads))


def _group_table(correlations: Correlations, groups: Sequence[Sequence[int]], level: str) -> Table:
    several = [group for group in groups if len(group) > 1]
    alone = sum(len(group) == 1 for group in groups)

    def mean(group: Sequence[int]) -> float:
        block = correlations.matrix[np.ix_(group, group)]
        return float(np.nanmean(block[~np.eye(len(group), dtype=bool)]))

    return table(
        f"{len(several)} groups with a correlation from {level}; {alone} heads are in none",
        ["heads", "mean correlation", "which"],
        [
            [str(len(group)), number(mean(group)), ", ".join(correlations.names[head] for head in group)]
            for group in several
        ],
        numeric={0, 1},
        long={2},
    )
