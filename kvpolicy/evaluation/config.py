"""What an evaluation judges."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpolicy.errors import InputError
from kvpolicy.methods.registry import DEFAULT_METHODS, method_names, method_type
from kvpolicy.protocol import SETTINGS, check_setting
from kvpolicy.ranking import NUM_RECENT_TOKENS, NUM_SINK_TOKENS

_LEAST = {
    "num_samples": 1,
    "num_generated": 0,
    "num_ranked": 0,
    "num_analysed": 0,
    "num_policy_seeds": 1,
    "num_random_seeds": 1,
    "num_resamples": 100,
    "examples_per_shard": 1,
}


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is judged.

    Attributes:
        tasks: Tasks to judge on; None for those that are trained on.
        length_tokens: Length of their prompts with the answer; None for that of the prompts that are trained on.
        methods: Names of methods; `full` and `oracle` always take part.
        budgets: Entries kept per KV head, in tokens, ascending.
        settings: `query_agnostic`, `query_aware` or both.
        chunk_tokens: Contexts are run in chunks of so many tokens, and compressed after each; None runs and compresses
            them at once. `full` and `oracle` are always of the whole context, and what rankings cost heads is too.
        num_samples: Samples of each task, of the test split.
        num_generated: How many of these are also answered, for the metrics that judge answers.
        num_ranked: How many of these also keep every ranking, token by token, for people to look at; none in chunks,
            where no single ranking says what is kept.
        num_analysed: How many of these also tell what future attention becomes on compacted caches, whether optimal
            sets are nested, and what single tokens are worth; none in chunks.
        max_answer_tokens: Tokens at which an answer is cut, where the task allows more; None leaves it to the task.
        num_policy_seeds: Policy sets that take part, each trained with a seed of its own.
        num_random_seeds: Seeds of the random method.
        num_resamples: Bootstrap resamples.
        confidence: Of the intervals.
        examples_per_shard: Examples that are judged and committed at once.
    """

    tasks: tuple[str, ...] | None = None
    length_tokens: int | None = None
    methods: tuple[str, ...] = DEFAULT_METHODS
    budgets: tuple[int, ...] = (64, 96, 128, 192, 256, 384, 512)
    settings: tuple[str, ...] = SETTINGS
    chunk_tokens: int | None = None
    num_samples: int = 5
    num_generated: int = 2
    num_ranked: int = 1
    num_analysed: int = 0
    max_answer_tokens: int | None = None
    num_policy_seeds: int = 1
    num_random_seeds: int = 1
    num_resamples: int = 2000
    confidence: float = 0.95
    examples_per_shard: int = 6

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: Naming each wrong field, what was got and what was expected.
        """
        for method in self.methods:
            method_type(method)
        for setting in self.settings:
            check_setting(setting)
        if problems := list(self._problems()):
            raise InputError("evaluate: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        always = NUM_SINK_TOKENS + NUM_RECENT_TOKENS
        for budget in self.budgets:
            if budget < always:
                yield f"budget {budget} is below the {always} tokens that are always kept"
        for name in ("methods", "budgets", "settings"):
            given = getattr(self, name)
            if not given:
                yield f"{name} is empty, expected at least one"
            if len(set(given)) < len(given):
                yield f"{name} has a value twice"
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                yield f"{name} is {getattr(self, name)}, expected at least {least}"
        for name in ("num_generated", "num_ranked", "num_analysed"):
            if getattr(self, name) > self.num_samples:
                yield f"{name} is {getattr(self, name)}, expected at most num_samples ({self.num_samples})"
        yield from self._chunk_problems()
        if self.max_answer_tokens is not None and self.max_answer_tokens < 1:
            yield f"max_answer_tokens is {self.max_answer_tokens}, expected at least 1"
        if not 0 < self.confidence < 1:
            yield f"confidence is {self.confidence}, expected between 0 and 1"

    def _chunk_problems(self) -> Iterator[str]:
        if self.chunk_tokens is None:
            return
        if self.chunk_tokens < 1:
            yield f"chunk_tokens is {self.chunk_tokens}, expected at least 1"
        if self.num_analysed:  # its figures would stand beside those of other caches
            yield f"num_analysed is {self.num_analysed}, expected 0 with chunk_tokens, as analyses compress once"
        for name in self.methods:
            kind = method_type(name)
            if kind.recompression_obstacle is not None and name not in {"full", "oracle"}:
                yield f"{name} cannot be judged in chunks, as {kind.recompression_obstacle}: leave it out"

    @property
    def contenders(self) -> tuple[str, ...]:
        """All methods that take part, in the order of tables."""
        return tuple(name for name in method_names() if name in {*self.methods, "full", "oracle"})

    @property
    def trained_kinds(self) -> frozenset[str]:
        """Kinds of artifacts that the methods are made from: `policy_set`, `soft_tokens`."""
        return frozenset(filter(None, (method_type(name).trained for name in self.contenders)))

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
