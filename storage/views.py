"""Views over the catalog's tables for the questions that come up every day; `storage.sql` makes them.

Each has a description, which `kvp sql "SELECT * FROM views"` shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class View:
    """A named query.

    Attributes:
        description: what it answers.
        query: its SQL.
    """

    description: str
    query: str


def _walk(*, known: str, found: str) -> str:
    """Artifacts that steps from column `known` to column `found` lead to, the first one included."""
    return f"""
        WITH RECURSIVE reached(artifact_id) AS (
            SELECT id UNION SELECT {found} FROM lineage_steps JOIN reached ON {known} = artifact_id
        )
        SELECT artifacts.* FROM artifacts JOIN reached USING (artifact_id)
    """


VIEWS: Mapping[str, View] = {
    "latest_curves": View(
        description="curves of the newest evaluation of each model, method, benchmark, setting and seed",
        query="""
            WITH evaluations AS (
                SELECT evaluation_id, max(ended_at) AS ended_at FROM curves JOIN runs USING (run_id) GROUP BY ALL
            )
            SELECT curves.* FROM curves JOIN evaluations USING (evaluation_id)
            QUALIFY ended_at = max(ended_at) OVER (PARTITION BY model_id, method, benchmark, setting, seed)
        """,
    ),
    "worst_heads": View(
        description="heads by held-out cost, worst first, of the newest policy set of each model",
        query="""
            SELECT heads.* FROM heads JOIN runs USING (run_id)
            QUALIFY ended_at = max(ended_at) OVER (PARTITION BY model_digest)
            ORDER BY heldout_cost DESC
        """,
    ),
    "run_costs": View(
        description="seconds by stage, outcome and hardware: what was spent, and on failures",
        query="""
            SELECT stage, outcome, hardware, count(*) AS runs, sum(seconds) AS seconds, max(ended_at) AS last
            FROM runs GROUP BY ALL ORDER BY seconds DESC
        """,
    ),
    "lineage_steps": View(
        description="one step of lineage: made (an artifact) from what a completed run read",
        query="""
            SELECT o.artifact_id AS made, i.artifact_id AS source, run_id, o.name AS made_as, i.name AS read_as
            FROM edges o JOIN edges i USING (run_id) WHERE o.role = 'output' AND i.role = 'input'
        """,
    ),
}

MACROS: Mapping[str, View] = {
    "lineage_up(id)": View(
        description="everything that an artifact came from: SELECT * FROM lineage_up('curve-...')",
        query=_walk(known="made", found="source"),
    ),
    "lineage_down(id)": View(
        description="everything that came from an artifact: SELECT * FROM lineage_down('model-...')",
        query=_walk(known="source", found="made"),
    ),
}
