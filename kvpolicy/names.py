"""Names that stores, figures and the science share, each declared once.

Samples and traces are named by some of them, so that a change here makes prompts and traces stale. Names that only
results have are in `kvpolicy.results`.
"""

from typing import Literal, get_args

LEARNED = "kvp"
"""The method that this project is about: one agent for each KV head, trained on futures."""
BOUNDS = ("full", "oracle")
"""Methods that are no contenders: no eviction, and the best ranking there is, made by knowing the future."""

SETTINGS = ("query_agnostic", "query_aware")
"""When a cache is compressed: before the question, or after it."""
CHAMPION = "champion"
"""The policy set that is to be used for a model."""
MEAN_TASK = "mean"
"""Stands where a task is named, for the mean over all of them."""

TRAINING_SPLIT, HELDOUT_SPLIT, TEST_SPLIT = SPLITS = ("train", "validation", "test")
"""Samples to train on, to measure a training by, and to evaluate on."""

Compression = Literal["none", "zstd", "shuffled_zstd"]
COMPRESSIONS = get_args(Compression)
"""How chunks of stored traces are compressed."""
