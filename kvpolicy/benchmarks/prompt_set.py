"""A set of prompts: which samples of which tasks, generated for one tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpolicy.benchmarks.registry import task_info, tasks_of
from kvpolicy.benchmarks.ruler import DEFAULT_TASKS, SPLITS, RulerTexts, generate, read_texts
from kvpolicy.benchmarks.sample import Sample
from kvpolicy.errors import InputError
from kvpolicy.prompts import count_prompt_tokens


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """What prompts are about, the same for training and for judging.

    Attributes:
        benchmark: Name of the benchmark.
        tasks: Its tasks.
        length_tokens: Prompt and answer together have at most so many tokens.
        essays: Text files for the tasks that need prose.
        squad: SQuAD v2.0 file, for `qa_1`.
        hotpotqa: HotpotQA dev distractor file, for `qa_2`.
    """

    benchmark: str = "ruler"
    tasks: tuple[str, ...] = tuple(DEFAULT_TASKS)
    length_tokens: int = 1152
    essays: tuple[str, ...] = ()
    squad: str | None = None
    hotpotqa: str | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InputError: Naming each wrong field, what was got and what was expected.
        """
        tasks_of(self.benchmark)
        if not self.tasks:
            raise InputError("prompts: tasks is empty, expected at least one")
        if len(set(self.tasks)) < len(self.tasks):
            twice = next(task for task in self.tasks if self.tasks.count(task) > 1)
            raise InputError(f"prompts: tasks has {twice} twice, expected each once")
        texts = {"essays": bool(self.essays), "squad": bool(self.squad), "hotpotqa": bool(self.hotpotqa)}
        for task in self.tasks:
            info = task_info(self.benchmark, task)
            if info.needs_text is not None and not texts[info.needs_text]:
                raise InputError(
                    f"prompts: task {task} needs outside text, and {info.needs_text} is not given: "
                    f"pass {info.text_source}"
                )
        if self.length_tokens < 1:
            raise InputError(f"prompts: length_tokens is {self.length_tokens}, expected at least 1")

    def read_texts(self) -> RulerTexts:
        """Read the outside texts that are named.

        Raises:
            InputError: If a file is missing or is not what it should be.
        """
        return read_texts(
            essays=[Path(path) for path in self.essays],
            squad=None if self.squad is None else Path(self.squad),
            hotpotqa=None if self.hotpotqa is None else Path(self.hotpotqa),
        )


def generate_samples(
    config: PromptConfig, *, split: str, num_samples_per_task: int, seed: int, tokenizer: Any
) -> tuple[Sample, ...]:
    """Generate the samples of one split, task by task in turn.

    Args:
        config: What they are about.
        split: `train`, `validation` or `test`.
        num_samples_per_task: Samples of each task.
        seed: Of the set.
        tokenizer: Lengths are counted in its tokens.

    Raises:
        InputError: If a task does not fit in the length, or its text is missing.
    """
    if split not in SPLITS:
        raise InputError(f"split {split!r} is unknown, expected one of {', '.join(SPLITS)}")
    texts = config.read_texts()
    return tuple(
        generate(
            task,
            split=split,
            index=index,
            seed=seed,
            length_tokens=config.length_tokens,
            count_tokens=lambda sample: count_prompt_tokens(sample, tokenizer),
            texts=texts,
        )
        for index in range(num_samples_per_task)
        for task in config.tasks
    )
