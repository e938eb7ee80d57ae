"""Curve points as the catalog gives them."""

import math
from typing import Any

METHODS = ["kvp", "oracle", "full", "random", "streaming_llm", "knorm", "keydiff", "lagkv", "snapkv", "tova", "h2o"]
BUDGETS = [32, 64, 96, 128, 192, 256, 384, 512]
SETTINGS = ["query_agnostic", "query_aware"]
TASKS = ["mean", "niah_single", "vt"]


def point(**changes: Any) -> dict[str, Any]:
    row = {
        "method": "kvp",
        "benchmark": "ruler",
        "task": "mean",
        "setting": "query_agnostic",
        "metric": "kl",
        "budget": 64,
        "value": 0.5,
        "ci_low": 0.4,
        "ci_high": 0.6,
        "n": 48,
        "seed": 0,
        "mlflow_run_id": "a field that no figure needs",
    }
    return row | changes


def many_rows() -> list[dict[str, Any]]:
    """Eleven methods at eight budgets, both settings, three metrics, two tasks and their mean; kvp has three seeds."""
    made = []
    for setting in SETTINGS:
        for place, method in enumerate(METHODS):
            for seed in range(3 if method == "kvp" else 1):
                for task in TASKS:
                    for budget in BUDGETS:
                        loss = 0.0 if method == "full" else math.exp(place / 4) * (1 + 0.1 * seed) * 2 / budget
                        for metric in ("kl", "kl_answer", "string_match"):
                            value = 1 / (1 + loss) if metric == "string_match" else loss
                            made.append(
                                point(
                                    method=method,
                                    setting=setting,
                                    seed=seed,
                                    task=task,
                                    budget=budget,
                                    metric=metric,
                                    value=value,
                                    ci_low=0.8 * value,
                                    ci_high=1.1 * value,
                                )
                            )
    return made
