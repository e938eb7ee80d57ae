"""The tokens that one head keeps of a context at a budget, against the best choice of as many tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.token_ranks import StoredContext, StoredRanking

ORACLE = ("oracle", 0)
NUM_SINK_TOKENS, NUM_RECENT_TOKENS = 4, 16
"""First and last tokens that every budget keeps, as the evaluation protocol has them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadChoice:
    """One method's choice in one head, token by token.

    Attributes:
        ranks: rank of each token under the method, from 1, kept longest.
        best_ranks: the same under the oracle.
        importance: share of the head's future attention that each token receives.
        num_kept: tokens that the head keeps.
    """

    ranks: NDArray[np.int32]
    best_ranks: NDArray[np.int32]
    importance: NDArray[np.float64]
    num_kept: int

    @classmethod
    def of(cls, context: StoredContext, ranking: StoredRanking, *, head: int, budget: int) -> "HeadChoice":
        """The choice of a ranking in a head at one of the context's budgets.

        A method that shares its budget unevenly keeps another number in this head; the oracle is given that number.
        """
        oracle = context.find(*ORACLE)
        assert oracle is not None  # it takes part in every evaluation
        importance = context.importance[head].astype(np.float64)
        total = importance.sum()
        return cls(
            ranks=ranking.ranks[head],
            best_ranks=oracle.ranks[head],
            importance=importance / total if total > 0 else importance,
            num_kept=int(ranking.kept[context.budgets.index(budget), head]),
        )

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Tokens that the method keeps."""
        return self.ranks <= self.num_kept

    @property
    def best(self) -> NDArray[np.bool_]:
        """Tokens that the oracle would keep."""
        return self.best_ranks <= self.num_kept

    @property
    def wrongly_dropped(self) -> NDArray[np.bool_]:
        """Tokens that the oracle would keep and the method does not."""
        return self.best & ~self.kept

    @property
    def wrongly_kept(self) -> NDArray[np.bool_]:
        """Tokens that the method keeps and the oracle would not."""
        return self.kept & ~self.best

    @property
    def share_kept(self) -> float:
        """Share of the future attention that the kept tokens receive."""
        return float(self.importance[self.kept].sum())

    @property
    def best_share(self) -> float:
        """Share of the future attention that the oracle's choice receives."""
        return float(self.importance[self.best].sum())

    @property
    def always_kept(self) -> NDArray[np.bool_]:
        """First and last tokens, which every method keeps."""
        places = np.arange(len(self.ranks))
        return (places < NUM_SINK_TOKENS) | (places >= len(places) - NUM_RECENT_TOKENS)


def shares_by_budget(ranks: NDArray[np.int32], importance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of the importance that a head keeps with 1, 2, ... tokens."""
    return importance[np.argsort(ranks)].cumsum()


def most_selective_head(context: StoredContext) -> int:
    """The head whose future attention falls on the fewest tokens, by its entropy: where there is most to see.

    Tokens that are always kept do not count, and heads that attend to no others come last.
    """
    between = context.importance[:, NUM_SINK_TOKENS:-NUM_RECENT_TOKENS].astype(np.float64)
    totals = between.sum(axis=1)
    shares = between / np.where(totals > 0, totals, 1)[:, None]
    entropies = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=1)
    return int(np.where(totals > 0, entropies, np.inf).argmin())
