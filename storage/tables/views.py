"""Views over the catalog's tables for the questions that come up every day; `storage.catalog.sql` makes them.

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


# Runs with their place in the order in which they were recorded, since clocks may jump; `storage.catalog.sql` makes it.
PLACED = "recorded.runs"
_EXTREME_HEADS = 5
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
    "best_and_worst_heads": View(
        description=f"the {_EXTREME_HEADS} best and {_EXTREME_HEADS} worst heads by held-out cost, "
        "of the newest policy set of each model",
        query=f"""
            SELECT
                row_number() OVER (PARTITION BY policy_set_id ORDER BY heldout_cost, head) AS from_best,
                row_number() OVER (PARTITION BY policy_set_id ORDER BY heldout_cost DESC, head) AS from_worst,
                worst_heads.*
            FROM worst_heads
            QUALIFY least(from_best, from_worst) <= {_EXTREME_HEADS}
            ORDER BY model_digest, from_best
        """,
    ),
    "who_beats_whom": View(
        description="who beats whom at which budget, with what confidence, in the newest evaluation of each model, "
        "benchmark and setting: each pair of contenders once, the leading one first; it leads for certain where the "
        "verdict is better",
        query=f"""
            SELECT * EXCLUDE (place, is_contest, run_id) FROM comparisons JOIN {PLACED} USING (run_id)
            WHERE is_contest
                AND (confidence > 0.5 OR confidence = 0.5 AND method < other)
            QUALIFY place = max(place) OVER (PARTITION BY model_digest, benchmark, setting)
            ORDER BY model_digest, benchmark, setting, metric, budget, method, other
        """,
    ),
    "training_outcomes": View(
        description="held-out eviction cost, mean over heads, by objective, agent, seed and steps of each training",
        query="""
            SELECT
                policy_set_id,
                model_digest,
                json_extract_string(parameters_json, '$.train.objective') AS objective,
                json_extract_string(parameters_json, '$.train.agent') AS agent,
                seed,
                any_value(steps) AS steps,
                avg(heldout_cost) AS mean_heldout_cost,
                count(*) AS num_heads,
                run_id
            FROM heads JOIN runs USING (run_id)
            GROUP BY ALL
            ORDER BY model_digest, mean_heldout_cost
        """,
    ),
    "champions": View(
        description="the champion of each model, since when and why: the last decision that moved it",
        query=f"""
            SELECT champion_id, champion_before_id, kind, reason, created_at, model_digest, run_id
            FROM promotions JOIN {PLACED} USING (run_id)
            WHERE decision = 'promoted'
            QUALIFY place = max(place) OVER (PARTITION BY model_digest)
            ORDER BY model_digest
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
