"""One example of a benchmark: a context whose cache is ranked, and the question and answer that come after it."""

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt in the parts that decide what is ranked and what counts as future.

    A sample with turns is a dialogue: its context and answer are those turns joined by blank lines, for people, and
    its question is empty. Where it is turned into tokens, the model's own chat format goes around every turn.

    Attributes:
        sample_id: `benchmark/task/split/seed/index/length_tokens`, unique and reproducible.
        benchmark: Name of the benchmark, such as `ruler`.
        task: Task of the benchmark, such as `niah_single_1`.
        split: `train`, `validation` or `test`.
        context: Instruction and haystack; what is ranked in the query-agnostic setting.
        question: What follows the context in the user's turn.
        answer_prefix: Begins the assistant's turn; may be empty.
        answer: Reference continuation after the prefix.
        references: Strings that the metric looks for.
        max_new_tokens: Tokens that the model may generate.
        options: Continuations that the model chooses from, if it does; `answer` is the right one.
        context_turns: Turns of a dialogue that are ranked, the user's first, then in turn.
        answer_turns: Turns that follow them.
    """

    sample_id: str
    benchmark: str
    task: str
    split: str
    context: str
    question: str
    answer_prefix: str
    answer: str
    references: tuple[str, ...]
    max_new_tokens: int
    options: tuple[str, ...] = ()
    context_turns: tuple[str, ...] = ()
    answer_turns: tuple[str, ...] = ()

    def digest(self) -> str:
        """SHA-256 over every field, as hexadecimal; optional fields that are empty do not count."""
        optional = ("options", "context_turns", "answer_turns")
        fields = {name: value for name, value in asdict(self).items() if value or name not in optional}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
