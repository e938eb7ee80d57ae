"""Evaluating every method at every budget, from one prefill of each example."""

from kvpolicy.evaluation.analysis import analyse_example
from kvpolicy.evaluation.config import EvaluateConfig
from kvpolicy.evaluation.example import EvaluatedExample, evaluate_example, evaluate_examples
from kvpolicy.evaluation.results import (
    AnalysisResult,
    Contender,
    ExampleResult,
    Finding,
    HeadCosts,
    TokenRanking,
)

__all__ = [
    "AnalysisResult",
    "Contender",
    "EvaluateConfig",
    "EvaluatedExample",
    "ExampleResult",
    "Finding",
    "HeadCosts",
    "TokenRanking",
    "analyse_example",
    "evaluate_example",
    "evaluate_examples",
]
