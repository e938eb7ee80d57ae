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
        runs: SQL for the runs whose curves are all that it needs to read, or nothing.
    """

    description: str
    query: str
    runs: str = ""


# Runs with their place in the order in which they were recorded, since clocks may jump; `storage.sql` makes it.
PLACED = "recorded.runs"
_CURVE = "model_id, method, benchmark, setting, seed"
_NEWEST = f"""
    SELECT {_CURVE}, arg_max(run_id, place) AS run_id FROM curves JOIN {PLACED} USING (run_id) GROUP BY {_CURVE}
"""


def _walk(*, first: str, second: str) -> str:
    """Artifacts that lead on from one over edges of the role `first`, then, from a run, of the role `second`.

    The links are laid out once: within the recursion each step would work out the view `edges` again.
    """
    return f"""
        WITH RECURSIVE links AS MATERIALIZED (
            SELECT artifact_id AS known, run_id AS found FROM edges WHERE role = '{first}'
            UNION ALL SELECT run_id, artifact_id FROM edges WHERE role = '{second}'
        ), reached(name) AS (
            SELECT id UNION SELECT found FROM links JOIN reached ON known = name
        )
        SELECT artifacts.* FROM artifacts JOIN reached ON artifact_id = reached.name
    """


VIEWS: Mapping[str, View] = {
    "latest_curves": View(
        description="curves of the newest evaluation of each model, method, benchmark, setting and seed",
        query=f"""
            WITH newest AS MATERIALIZED ({_NEWEST})
            SELECT curves.* FROM curves SEMI JOIN newest USING (run_id, {_CURVE})
        """,
        runs=f"SELECT DISTINCT run_id FROM ({_NEWEST})",
    ),
    "worst_heads": View(
        description="heads by held-out cost, worst first, of the newest policy set of each model",
        query=f"""
            SELECT heads.* FROM heads JOIN {PLACED} USING (run_id)
            QUALIFY place = max(place) OVER (PARTITION BY model_digest)
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
        query=_walk(first="output", second="input"),
    ),
    "lineage_down(id)": View(
        description="everything that came from an artifact: SELECT * FROM lineage_down('model-...')",
        query=_walk(first="input", second="output"),
    ),
}
