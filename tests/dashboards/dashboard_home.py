"""A home for the dashboard: the planted evaluation of reports, and a second one that kept rankings token by token.

The ranked context has 40 tokens and two heads. Under the oracle token i of the middle ranks by its place; kvp swaps
the best two of the middle with the worst two, so that at a budget of 24 tokens two are wrongly dropped.
"""

from pathlib import Path
from typing import Any

import numpy as np
from report_home import (
    EVALUATE,
    MODEL,
    POLICIES,
    PROMPTS,
    artifact,
    comparison_rows,
    curve_rows,
    head_cost_rows,
    make_home,
    record,
)

from kvpolicy.digests import digest_bytes
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.lineage.artifacts import Artifact
from storage.token_ranks import StoredContext, StoredRanking, write_token_ranks

RANKED = artifact("evaluation", "tiny model on ruler, 4 samples")
TOKENS, SAMPLE = 40, "ruler/vt/test/0/0"
PIECES = (*(f" word{place}" for place in range(TOKENS - 1)), "<b>\n")


def _ranks(swapped: bool) -> np.ndarray:
    ranks = np.empty(TOKENS, dtype=np.int32)
    ranks[:4], ranks[-16:] = np.arange(1, 5), np.arange(5, 21)
    ranks[4:-16] = np.arange(21, TOKENS + 1)
    if swapped:
        first, last = [4, 5], [TOKENS - 18, TOKENS - 17]
        ranks[first], ranks[last] = ranks[last], ranks[first].copy()
    return ranks


def context() -> StoredContext:
    importance = np.full((2, TOKENS), 0.01, dtype=np.float32)
    importance[:, 4:-16] = 0.5 ** np.arange(TOKENS - 20)
    return StoredContext(
        sample_id=SAMPLE,
        benchmark="ruler",
        task="vt",
        setting="query_agnostic",
        budgets=(24, 32),
        pieces=PIECES,
        importance=importance,
    )


def rankings() -> list[StoredRanking]:
    kept = np.array([[24, 24], [32, 32]], dtype=np.int32)
    return [
        StoredRanking(
            sample_id=SAMPLE,
            setting="query_agnostic",
            method=method,
            seed=seed,
            ranks=np.stack([_ranks(method == "kvp")] * 2),
            kept=kept,
        )
        for method, seed in (("kvp", 0), ("kvp", 1), ("snapkv", 0), ("oracle", 0))
    ]


def make_dashboard_home(home: Home) -> dict[str, str]:
    """Fill a home; returns the run of each stage, the second evaluation's as `ranked`."""
    runs = make_home(home)
    catalog = Catalog(home)
    shards = {}
    for ranking in rankings():
        name, contexts = f"{ranking.method} {ranking.seed}", [context()] if ranking.method == "oracle" else []
        folder = ranked_folder(home, name)
        write_token_ranks(folder, contexts, [ranking])
        shards[f"shard_0000 {name}"] = Artifact(
            kind="evaluation_shard",
            digest=digest_bytes(name.encode()),
            name=f"{name} on examples 0 to 0",
            uri=str(folder),
            metadata={"num_contexts": len(contexts), "num_rankings": 1},
        )
    read = {"model": MODEL, "prompts": PROMPTS["test"], "policy_0": POLICIES[0]}
    for shard in shards.values():
        record(catalog, "evaluate-shard", read, {"shard": shard})
    own = {"evaluation_id": RANKED.artifact_id}
    runs["ranked"] = record(
        catalog,
        "evaluate",
        {**read, **shards},
        {"evaluation": RANKED},
        {
            "curves": _of(own, curve_rows()),
            "comparisons": _of(own, comparison_rows()),
            "head_costs": _of(own, head_cost_rows()),
        },
        parameters={"evaluate": EVALUATE, "dtype": "float32"},
        seed=1,
    )
    return runs


def _of(own: dict[str, Any], rows: Any) -> list[dict[str, Any]]:
    return [row | own for row in rows]


def ranked_folder(home: Home, name: str = "oracle 0") -> Path:
    return home.evaluations / "shards" / f"planted {name}"
