"""Scores of samples as an evaluation left them in the catalog, and what it takes to compare them again as it did.

No task: nothing is recorded when they are compared again.
"""

import json
from dataclasses import fields

from kvpolicy.results.scores import ExampleScore
from kvpolicy.results.statistics import Bootstrap
from storage.catalog.catalog import Catalog
from storage.tables.lance_table import quote


def stored_scores(catalog: Catalog, run_id: str, **wanted: str | int) -> list[ExampleScore]:
    """Scores that a run of an evaluation recorded.

    Args:
        catalog: The catalog.
        run_id: The run.
        wanted: Of which scores are read: columns of the table `scores` with the value that each has.

    Returns:
        In the order of the table; none if they are lost.
    """
    where = " AND ".join(
        f"{column} = {quote(value) if isinstance(value, str) else value}"
        for column, value in {"run_id": run_id, **wanted}.items()
    )
    rows = catalog.rows("scores", where, [entry.name for entry in fields(ExampleScore)])
    return [ExampleScore(**row) for row in rows]


def stored_bootstrap(catalog: Catalog, run_id: str) -> Bootstrap:
    """The bootstrap with which a run of an evaluation made its intervals."""
    (run,) = catalog.rows("runs", f"run_id = {quote(run_id)}", ["parameters_json", "seed"])
    evaluate = json.loads(run["parameters_json"])["evaluate"]
    return Bootstrap(seed=run["seed"] or 0, num_resamples=evaluate["num_resamples"], confidence=evaluate["confidence"])
