"""Who is champion: the decisions of the catalog's table `promotions`, read as a history of each model's policy sets.

The catalog is the record; aliases in MLflow's registry follow it (`storage.mlflow.tracking`). Not for how a decision is
made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.catalog.catalog import Catalog
from storage.tables.lance_table import quote

AUTOMATIC, MANUAL, ROLLBACK = "automatic", "manual", "rollback"
PROMOTED, KEPT = "promoted", "kept"


@dataclass(frozen=True, kw_only=True)
class PromotionHistory:
    """The decisions on one model's policy sets.

    Attributes:
        rows: rows of the table, in the order in which they were made.
    """

    rows: Sequence[Mapping[str, Any]]

    @property
    def champion(self) -> str:
        """The champion; "" if there was no decision yet."""
        return str(self.rows[-1]["champion_id"]) if self.rows else ""

    @property
    def challenger(self) -> str:
        """The policy set that the last decision after an evaluation was about; "" if there was none."""
        return next((str(row["challenger_id"]) for row in reversed(self.rows) if row["kind"] == AUTOMATIC), "")

    @property
    def last_run_id(self) -> str:
        """The run that made the last decision; "" if there was none."""
        return str(self.rows[-1]["run_id"]) if self.rows else ""

    @property
    def champion_before(self) -> str:
        """The champion that a rollback goes back to; "" if there is none. Going back twice goes back two champions."""
        line = [str(self.rows[0]["champion_before_id"])] if self.rows else []
        for row in self.rows:
            if row["kind"] == ROLLBACK:
                line.pop()
            elif row["champion_id"] != line[-1]:
                line.append(str(row["champion_id"]))
        return line[-2] if len(line) > 1 else ""

    def decision_on(self, challenger_id: str, evaluation_id: str) -> Mapping[str, Any] | None:
        """Return the decision after an evaluation of a policy set, or None."""
        wanted = (AUTOMATIC, challenger_id, evaluation_id)
        decisions = (row for row in self.rows if (row["kind"], row["challenger_id"], row["evaluation_id"]) == wanted)
        return next(decisions, None)


def read_history(catalog: Catalog, model_digest: str) -> PromotionHistory:
    """Return the decisions on the policy sets of a model.

    Raises:
        StorageError: if the catalog cannot be read.
    """
    return PromotionHistory(rows=catalog.rows("promotions", f"model_digest = {quote(model_digest)}"))


def decided_models(catalog: Catalog) -> list[str]:
    """Return the digests of the models that have a champion, in the order of their first decisions.

    Raises:
        StorageError: if the catalog cannot be read.
    """
    return list(dict.fromkeys(row["model_digest"] for row in catalog.rows("promotions", columns=["model_digest"])))
