"""The settings of an evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from kvpolicy.config.settings import Count, InnerShare, Positive, Settings, Several, at_least
from kvpolicy.errors import InputError
from kvpolicy.methods.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS
from kvpolicy.methods.registry import DEFAULT_METHODS, method_names, method_type
from kvpolicy.names import BOUNDS, SETTINGS
from kvpolicy.text.protocol import Setting


def _check_budget(budget: int) -> None:
    always = NUM_SINK_TOKENS + NUM_RECENT_TOKENS
    if budget < always:
        raise InputError(f"budget {budget} is below the {always} tokens that are always kept")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Settings):
    """Methods, budgets and samples of an evaluation."""

    tasks: Several[str] | None = None
    """Tasks to evaluate on; None for those that are trained on."""
    length_tokens: Positive | None = None
    """Length of their prompts with the answer; None for that of the prompts that are trained on."""
    methods: Several[Annotated[str, method_type]] = DEFAULT_METHODS
    """Methods to evaluate; `full` and `oracle` always take part."""
    budgets: Several[Annotated[int, _check_budget]] = (64, 96, 128, 192, 256, 384, 512)
    """Budgets: entries kept per KV head, in tokens, ascending."""
    settings: Several[Setting] = SETTINGS
    """`query_agnostic`, `query_aware` or both."""
    chunk_tokens: Positive | None = None
    """Contexts are run in chunks of so many tokens, and compressed after each; None runs and compresses them at once.
    `full` and `oracle` are always of the whole context, and what rankings cost heads is too.
    """
    num_samples: Positive = 5
    """Samples of each task, of the test split."""
    num_generated: Count = 2
    """How many of these are also answered, for the metrics of answers."""
    num_ranked: Count = 1
    """How many of these also keep every ranking, token by token, for people to look at; none in chunks, where no
    single ranking says what is kept.
    """
    num_analysed: Count = 0
    """How many of these also tell what future attention becomes on compacted caches, whether optimal sets are nested,
    and what single tokens are worth; none in chunks.
    """
    max_answer_tokens: Positive | None = None
    """Tokens at which an answer is cut, where the task allows more; None leaves it to the task."""
    num_policy_seeds: Positive = 1
    """Policy sets that take part, each trained with a seed of its own."""
    num_random_seeds: Positive = 1
    """Seeds of the random method."""
    num_resamples: Annotated[int, at_least(100)] = 2000
    """Bootstrap resamples."""
    confidence: InnerShare = 0.95
    """Confidence level of the intervals."""
    examples_per_shard: Positive = 6
    """Examples that are evaluated and committed at once."""

    def conflicts(self) -> Iterator[str]:
        """List numbers above that of the samples, and settings that chunks exclude."""
        for name in ("num_generated", "num_ranked", "num_analysed"):
            if getattr(self, name) > self.num_samples:
                yield f"{name} is {getattr(self, name)}, expected at most num_samples ({self.num_samples})"
        if self.chunk_tokens is None:
            return
        if self.num_analysed:  # its figures would stand beside those of other caches
            yield f"num_analysed is {self.num_analysed}, expected 0 with chunk_tokens, as analyses compress once"
        for name in self.methods:
            kind = method_type(name)
            if kind.recompression_obstacle is not None and name not in BOUNDS:
                yield f"methods: {name} cannot be evaluated in chunks, as {kind.recompression_obstacle}: leave it out"

    @property
    def contenders(self) -> tuple[str, ...]:
        """All methods that take part, in the order of tables."""
        return tuple(name for name in method_names() if name in {*self.methods, *BOUNDS})

    @property
    def trained(self) -> dict[str, str]:
        """Methods that are made from something that was trained, and its kind: `policy_set`, `soft_tokens`."""
        kinds = {name: method_type(name).trained for name in self.contenders}
        return {name: kind for name, kind in kinds.items() if kind}

    @property
    def trained_kinds(self) -> frozenset[str]:
        """Kinds of artifacts that the methods are made from."""
        return frozenset(self.trained.values())

    def check_context(self, num_tokens: int, sample_id: str) -> None:
        """Check that every budget fits in a context.

        Raises:
            InputError: Naming the largest budget and the context.
        """
        if max(self.budgets) > num_tokens:
            raise InputError(
                f"evaluate: budget {max(self.budgets)} is above the context of sample {sample_id}, which has "
                f"{num_tokens} tokens: choose smaller budgets or longer prompts (length_tokens)"
            )
