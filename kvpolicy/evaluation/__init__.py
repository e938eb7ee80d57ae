"""Judging every method at every budget on one example, from one prefill."""

from kvpolicy.evaluation.analysis import analyse_example
from kvpolicy.evaluation.config import EvaluateConfig
from kvpolicy.evaluation.example import evaluate_example
from kvpolicy.evaluation.results import (
    AnalysisResult,
    Contender,
    ExampleResult,
    Finding,
    HeadCosts,
    RankedContext,
    Score,
    TokenRanking,
)

__all__ = [
    "AnalysisResult",
    "Contender",
    "EvaluateConfig",
    "ExampleResult",
    "Finding",
    "HeadCosts",
    "RankedContext",
    "Score",
    "TokenRanking",
    "analyse_example",
    "evaluate_example",
]
