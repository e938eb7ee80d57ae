"""Scores of made-up examples, for tests of what they add up to."""

import numpy as np

from kvpolicy.results.scores import ExampleScore

TASKS = ("vt",) * 3 + ("cwe",) * 5
BOOTSTRAP = {"seed": 0, "num_resamples": 500, "confidence": 0.95}


def example_scores(
    method, values, *, tasks=TASKS, seed=0, budget=64, metric="kl", setting="query_agnostic", benchmark="ruler"
):
    """One score an example."""
    return [
        ExampleScore(
            sample_id=f"sample-{index}",
            benchmark=benchmark,
            task=task,
            setting=setting,
            method=method,
            seed=seed,
            budget=budget,
            metric=metric,
            value=float(value),
        )
        for index, (task, value) in enumerate(zip(tasks, values, strict=True))
    ]


def draw(seed, tasks=TASKS):
    """Independent normal values, one an example."""
    return np.random.default_rng(seed).normal(size=len(tasks))
