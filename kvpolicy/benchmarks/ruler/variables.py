"""Variable tracking (vt) of RULER: a chain of assignments in noise, and a question for every variable of the chain.

Follows NVIDIA/RULER, `scripts/data/synthetic/variable_tracking.py`: one chain of four hops (five variables of five
capitals, a 5-digit value), noise lines joined with the assignments by blanks, and one worked example before it whose
variables have three capitals. There the example is as long as fits 500 tokens; here it has up to ten noise lines, a
line per 200 tokens of the length, so that it does not crowd out a short haystack. There the example keeps its value
over all samples; here it is drawn, so that no split shares one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpolicy.benchmarks.ruler.needles import NOISE
from kvpolicy.benchmarks.ruler.prompt_plan import Plan
from kvpolicy.benchmarks.ruler.vocabulary import Draw

NUM_HOPS = 4
_MAX_EXAMPLE_LINES = 10
_TOKENS_PER_EXAMPLE_LINE = 200


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Variables that all hold one value, and where their assignments lie.

    Attributes:
        variables: Names, in the order of assignment.
        value: What the first is assigned.
        depths: Places of the assignments as shares of the noise, ascending.
    """

    variables: tuple[str, ...]
    value: str
    depths: tuple[float, ...]

    def in_noise(self, num_lines: int) -> str:
        """The assignments among `num_lines` lines of noise."""
        assigned = (self.value, *(f"VAR {name}" for name in self.variables))
        statements = [f"VAR {name} = {source}" for name, source in zip(self.variables, assigned, strict=False)]
        pieces = [f"{NOISE}\n"] * num_lines
        for depth, statement in reversed(list(zip(self.depths, statements, strict=True))):
            pieces.insert(int(depth * (num_lines + 1)), statement)
        return " ".join(pieces)

    @property
    def question(self) -> str:
        """What is asked."""
        return f"Question: Find all variables that are assigned the value {self.value} in the text above."

    @property
    def answer_prefix(self) -> str:
        """How the answer begins; RULER's spelling of `assigned` is part of the benchmark."""
        return (
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(self.variables)} variables are assgined the value {self.value}, they are:"
        )

    @property
    def answer(self) -> str:
        """The names, as the worked example lists them."""
        return f" {' '.join(self.variables)}"


def plan_variables(draw: Draw, *, length_tokens: int) -> list[Plan]:
    """Draws a sample's chains: with its worked example in noise, and for short lengths with the bare example.

    A unit of haystack is a line of noise around the chain that is asked for.
    """
    value, example_value = draw.take("value", "values", 2)
    chain = _chain(draw, kind="variable", value=value)
    example = _chain(draw, kind="example_variable", value=example_value)
    lines = min(_MAX_EXAMPLE_LINES, length_tokens // _TOKENS_PER_EXAMPLE_LINE)

    def write(example_lines: int, size: int) -> Mapping[str, Any]:
        solved = f"{example.question} {example.answer_prefix}{example.answer}\n\n\n\n"
        return {
            "context": f"{_task_text(example, example_lines)}{solved}{_task_text(chain, size)}",
            "question": chain.question,
            "answer_prefix": chain.answer_prefix,
            "answer": f"{chain.answer}.",
            "references": chain.variables,
        }

    return [Plan(write=partial(write, count)) for count in sorted({lines, 0})[::-1]]


def _chain(draw: Draw, *, kind: str, value: str) -> Chain:
    rng = draw.rng(f"places:{kind}")
    names = draw.take(kind, "names", NUM_HOPS + 1)
    return Chain(variables=tuple(names), value=value, depths=tuple(sorted(rng.random() for _ in names)))


def _task_text(chain: Chain, num_lines: int) -> str:
    return (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{chain.in_noise(num_lines).rstrip()}\n"
    )
