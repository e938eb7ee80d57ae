"""The two question answering tasks of RULER: a question whose paragraphs are hidden among others.

Follows NVIDIA/RULER, `scripts/data/synthetic/qa.py`. Distractors that are near the question (the same SQuAD article,
HotpotQA's own distractors) come first, then others of the split. Departures: the places of the gold paragraphs are
drawn per sample (there a fixed shuffle seed puts them in one slot for all samples), and only the gold paragraphs are
indispensable (there also HotpotQA's own distractors), so that short lengths work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpolicy.benchmarks.ruler.prompt_plan import Plan
from kvpolicy.benchmarks.ruler.tasks import RulerTask
from kvpolicy.benchmarks.ruler.texts import QuestionPool
from kvpolicy.benchmarks.ruler.vocabulary import Draw
from kvpolicy.errors import InputError

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)


def plan_question(task: RulerTask, draw: Draw, pool: QuestionPool, *, index: int, order_seed: int) -> Plan:
    """Picks the question of a sample and draws its distractors, paragraphs that are the units of its haystack.

    Args:
        task: `qa_1` or `qa_2`.
        draw: Randomness of the sample.
        pool: Questions of the split.
        index: Place in the shuffled order of the questions; every index is another question.
        order_seed: Seed of that order, the same for all samples of a split.

    Raises:
        InputError: There are not so many questions.
    """
    if index >= len(pool.questions):
        raise InputError(
            f"ruler/{task.task}: the {draw.split} split has {len(pool.questions)} questions, "
            f"so sample {index} does not exist: ask for fewer samples or give a larger {task.source} file"
        )
    order = list(range(len(pool.questions)))
    Draw(seed=order_seed, split=draw.split).rng("questions").shuffle(order)
    question = pool.questions[order[index]]
    rng = draw.rng("distractors")
    near = list(question.near)
    rng.shuffle(near)
    taken = {*question.gold, *near}
    far = [text for text in pool.documents if text not in taken]
    rng.shuffle(far)
    paragraphs = (*question.gold, *near, *far)  # in the order in which they fill the length
    places = [rng.random() for _ in paragraphs]

    def write(size: int) -> Mapping[str, Any]:
        written = zip(places, paragraphs[: len(question.gold) + size], strict=False)
        listed = "\n\n".join(f"Document {number}:\n{text}" for number, (_, text) in enumerate(sorted(written), start=1))
        return {
            "context": f"{_INSTRUCTION}The following are given documents.\n\n{listed}\n\n",
            "question": f"{_INSTRUCTION}Question: {question.text}",
            "answer_prefix": "Answer:",
            "answer": f" {question.answers[0]}",
            "references": question.answers,
        }

    return Plan(write=write, smallest=0, largest=len(near) + len(far))
