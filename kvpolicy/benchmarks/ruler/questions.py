"""The two question answering tasks of RULER: a question whose paragraphs are hidden among others.

Follows NVIDIA/RULER, `scripts/data/synthetic/qa.py`. Distractors that are near the question (the same SQuAD article,
HotpotQA's own distractors) come first, then others of the split. Departures: the places of the gold paragraphs are
drawn per sample (there a fixed shuffle seed puts them in one slot for all samples), and only the gold paragraphs are
indispensable (there also HotpotQA's own distractors), so that short lengths work.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpolicy.benchmarks.ruler.prompt_plan import Parts
from kvpolicy.benchmarks.ruler.tasks import RulerTask
from kvpolicy.benchmarks.ruler.texts import Question, QuestionPool
from kvpolicy.benchmarks.ruler.vocabulary import Draw
from kvpolicy.errors import InputError

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)


@dataclass(frozen=True, kw_only=True)
class QuestionPlan:
    """A question answering sample; a unit of haystack is a distracting paragraph.

    Attributes:
        question: What is asked.
        distractors: Paragraphs in the order in which they fill the length.
        places: A sort key for every paragraph, the gold ones first.
    """

    question: Question
    distractors: tuple[str, ...]
    places: tuple[float, ...]

    @property
    def smallest(self) -> int:
        """The gold paragraphs alone."""
        return 0

    @property
    def largest(self) -> int:
        """Every paragraph of the split."""
        return len(self.distractors)

    def write(self, size: int) -> Parts:
        """The prompt with `size` distractors."""
        documents = (*self.question.gold, *self.distractors[:size])
        ordered = [text for _, text in sorted(zip(self.places, documents, strict=False))]
        listed = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(ordered, start=1))
        return Parts(
            context=f"{_INSTRUCTION}The following are given documents.\n\n{listed}\n\n",
            question=f"{_INSTRUCTION}Question: {self.question.text}",
            answer_prefix="Answer:",
            answer=f" {self.question.answers[0]}",
            references=self.question.answers,
        )


def plan_question(task: RulerTask, draw: Draw, pool: QuestionPool, *, index: int, order_seed: int) -> QuestionPlan:
    """Picks the question of a sample and draws its distractors.

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
            f"ruler/{task.name}: the {draw.split} split has {len(pool.questions)} questions, "
            f"so sample {index} does not exist: ask for fewer samples or give a larger {task.text} file"
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
    distractors = (*near, *far)
    return QuestionPlan(
        question=question,
        distractors=distractors,
        places=tuple(rng.random() for _ in range(len(question.gold) + len(distractors))),
    )
