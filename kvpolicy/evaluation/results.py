"""Contenders of an evaluation, and their figures on one example."""

from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

from kvpolicy.methods.base import Method
from kvpolicy.results.scores import Result, Score


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A method as it takes part: with the seed that its policy or its draws come from."""

    method: Method
    seed: int


@dataclass(frozen=True, kw_only=True)
class HeadCosts(Result):
    """Eviction cost of one contender's ranking of one example in every KV head, normalised (1.0 is perfect)."""

    costs: Float[Tensor, "head"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRanking(Result):
    """The order in which one contender gives up the tokens of a context, and the attention that the future pays these.

    Attributes:
        ranks: From 1, kept longest, as `kvpolicy.methods.ranking.retention_ranks`: a head that keeps b tokens keeps
        ranks to b.
        kept: Tokens that each head keeps at each budget, in the order of the budgets.
        importance: Attention of the future to each token (`kvpolicy.attention.importance`), the same for all.
    """

    ranks: Int[Tensor, "head token"]
    kept: Int[Tensor, "budget head"]
    importance: Float[Tensor, "head token"]


@dataclass(kw_only=True)
class ExampleResult:
    """Everything that contenders come to on one example.

    Attributes:
        scores: Figures of every contender at every budget.
        head_costs: Costs of every contender that evicts, in each setting.
        rankings: Rankings of every contender that evicts, in each setting, where they were requested.
    """

    scores: list[Score] = field(default_factory=list)
    head_costs: list[HeadCosts] = field(default_factory=list)
    rankings: list[TokenRanking] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Finding(Result):
    """One figure of the analysis of one example.

    Attributes:
        analysis: `nestedness` or `leave_one_out`.
        quantity: `overlap` or `excess_missed_mass` of nestedness, `spearman` of leaving one out.
        budget: The smaller budget, of nestedness.
        larger_budget: The budget whose cache the smaller set was chosen from, of nestedness.
        value: The figure.
    """

    analysis: str
    quantity: str
    value: float
    budget: int | None = None
    larger_budget: int | None = None


@dataclass(kw_only=True)
class AnalysisResult:
    """Everything that the analysis of one example comes to.

    Attributes:
        scores: `missed_mass` and `reward_correlation`.
        findings: All other figures.
    """

    scores: list[Score] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
