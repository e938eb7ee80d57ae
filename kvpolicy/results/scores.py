"""Scores of single examples, as evaluations make them and everything else adds them up."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Result:
    """Anything that one contender comes to on one example.

    Attributes:
        setting: Which of the example's contexts it is of.
        method: The contender's method.
        seed: The contender's seed.
    """

    setting: str
    method: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Score(Result):
    """One figure of one example."""

    budget: int
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class ExampleScore(Score):
    """One figure of one example, with the example that it belongs to."""

    sample_id: str
    benchmark: str
    task: str
