"""Who takes part in an evaluation, and the figures that come of one example."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method as it takes part: with the seed that its policy or its draws come from."""

    method: Method
    seed: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """One figure of one example."""

    setting: str
    method: str
    seed: int
    budget: int
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class HeadCosts:
    """What one contender's ranking of one example costs every KV head, normalised (1.0 is perfect)."""

    setting: str
    method: str
    seed: int
    costs: Float[Tensor, "head"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRanking:
    """The order in which one contender gives up the tokens of a context, and what the future pays these.

    Attributes:
        setting: Which of the example's contexts it is.
        method: Whose ranking it is.
        seed: Of the method.
        ranks: From 1, kept longest, as `kvpolicy.methods.ranking.retention_ranks`: a head that keeps b tokens keeps
        ranks to b.
        kept: Tokens that each head keeps at each budget, in the order of the budgets.
        importance: What the future pays each token (`kvpolicy.attention.importance`), whoever ranks them.
    """

    setting: str
    method: str
    seed: int
    ranks: Int[Tensor, "head token"]
    kept: Int[Tensor, "budget head"]
    importance: Float[Tensor, "head token"]


@dataclass(frozen=True, kw_only=True)
class ExampleResult:
    """What the evaluation of one example came to.

    Attributes:
        scores: Of every contender at every budget.
        head_costs: Of every contender that evicts, in each setting.
        rankings: Of every contender that evicts, in each setting; none where they were not asked for.
    """

    scores: tuple[Score, ...]
    head_costs: tuple[HeadCosts, ...]
    rankings: tuple[TokenRanking, ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One figure of the analysis of one example.

    Attributes:
        setting: Of the example.
        analysis: `nestedness` or `leave_one_out`.
        quantity: `overlap` or `excess_missed_mass` of nestedness, `spearman` of leaving one out.
        method: Whose sets or scores it is about.
        seed: Of the method.
        budget: The smaller budget, of nestedness.
        larger_budget: The budget whose cache the smaller set was chosen from, of nestedness.
        value: The figure.
    """

    setting: str
    analysis: str
    quantity: str
    method: str
    seed: int
    budget: int | None
    larger_budget: int | None
    value: float


@dataclass(frozen=True, kw_only=True)
class AnalysisResult:
    """What the analysis of one example came to.

    Attributes:
        scores: `missed_mass` and `reward_correlation`.
        findings: What is no score.
    """

    scores: tuple[Score, ...]
    findings: tuple[Finding, ...]
