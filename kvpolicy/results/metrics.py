"""Metrics by the name under which they are stored: how figures call them, and which way is better.

`docs/metrics.md` defines them. `kl` and `kl_answer` are measured on every sample; the others where the sample's task
has them, the last two on the samples that are analysed.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What figures, tables and comparisons must know of a metric.

    Attributes:
        label: In words, with its unit.
        lower_is_better: Whether lower is better; such metrics are never below 0 and of many orders of magnitude.
        short: In fewer words; by default the label without its unit.
        explains: Whether it explains others, and methods do not compete for it.
    """

    label: str
    lower_is_better: bool = False
    short: str = ""
    explains: bool = False


METRICS: Mapping[str, Metric] = {
    "kl": Metric("KL from the full cache, question + answer (nats)", lower_is_better=True, short="fidelity (KL)"),
    "kl_answer": Metric(
        "KL from the full cache, answer (nats)", lower_is_better=True, short="fidelity over the answer (KL)"
    ),
    "string_match": Metric("string match (share of references found)"),
    "retrieval": Metric("right paragraph named"),
    "rouge_l": Metric("ROUGE-L (F)"),
    "accuracy": Metric("accuracy (log-likelihood of options)"),
    "accuracy_normalised": Metric("accuracy (log-likelihood per byte)"),
    "perplexity": Metric("perplexity of the future", lower_is_better=True),
    "reward_correlation": Metric("future attention, compacted and full: rank correlation", explains=True),
    "missed_mass": Metric("future attention that was evicted (share)", lower_is_better=True, explains=True),
}
FIDELITY = "kl"
"""The metric by which policies are promoted and runs summarised: it is measured on every sample."""
LOWER_IS_BETTER = frozenset(name for name, metric in METRICS.items() if metric.lower_is_better)
ANALYSES = tuple(name for name, metric in METRICS.items() if metric.explains)
