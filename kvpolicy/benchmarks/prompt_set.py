"""A set of prompts: which samples of which tasks, generated or read for one tokenizer."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from kvpolicy.benchmarks.registry import task_info, write_samples
from kvpolicy.benchmarks.ruler import DEFAULT_TASKS
from kvpolicy.benchmarks.sample_request import SampleRequest
from kvpolicy.benchmarks.sources import DataFiles, find_files, missing_source, parse_entry
from kvpolicy.benchmarks.splits import check_split
from kvpolicy.config.settings import Positive, Settings, Several
from kvpolicy.errors import InputError
from kvpolicy.text.sample import Sample


@dataclass(frozen=True, kw_only=True)
class PromptConfig(Settings):
    """What prompts are about, the same for training and for evaluation."""

    tasks: Several[Annotated[str, task_info]] = tuple(DEFAULT_TASKS)
    """Tasks of any benchmarks, to train on and to evaluate on."""
    length_tokens: Positive = 1152
    """Prompt and answer together have at most so many tokens."""
    data: tuple[Annotated[str, parse_entry], ...] = ()
    """Files for the tasks that need them, as `source=path` entries; a path is local or `hub:owner/name@rev/file`."""
    language: str = ""
    """Code of the one language of dialogues, such as `en`; empty for all, each dialogue in one of them."""

    def conflicts(self) -> Iterator[str]:
        """Say which tasks lack their files."""
        given = {parse_entry(entry)[0] for entry in self.data}
        for task in self.tasks:
            source = task_info(task).source
            if source is not None and source not in given:
                yield f"tasks: {missing_source(task, source)}"

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Names of the benchmarks that the tasks are of, in their order."""
        return tuple(dict.fromkeys(task_info(task).benchmark for task in self.tasks))

    def find_files(self, *, fetch: bool = True) -> DataFiles:
        """Find the outside files that are named.

        Args:
            fetch: Whether a file of the hub that is not in the cache may be fetched.

        Raises:
            InputError: If a file is missing.
        """
        return find_files(self.data, fetch=fetch)


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Samples, and what was not taken.

    Attributes:
        samples: Task by task in turn.
        reported: Counts, by task and reason, of what was left out or is not as it was asked for.
    """

    samples: tuple[Sample, ...]
    reported: Mapping[str, int]


def generate_samples(
    config: PromptConfig, *, split: str, num_samples_per_task: int, seed: int, tokenizer: Any
) -> PromptSet:
    """Generate or read the samples of one split, task by task in turn.

    Args:
        config: What they are about.
        split: `train`, `validation` or `test`.
        num_samples_per_task: Samples of each task.
        seed: Of the set.
        tokenizer: Lengths are counted in its tokens.

    Raises:
        InputError: If a task does not fit in the length, a file is missing or broken, or has too few samples.
    """
    check_split(split)
    files = config.find_files()
    reported: Counter[str] = Counter()
    by_task = []
    for task in config.tasks:
        request = SampleRequest(
            benchmark=task_info(task).benchmark,
            task=task,
            split=split,
            seed=seed,
            length_tokens=config.length_tokens,
            tokenizer=tokenizer,
            files=files,
            language=config.language,
            reported=reported,
        )
        samples = list(islice(write_samples(request), num_samples_per_task))
        if len(samples) < num_samples_per_task:
            raise InputError(_too_few(request, len(samples), num_samples_per_task))
        by_task.append(samples)
    return PromptSet(samples=tuple(sample for turn in zip(*by_task, strict=True) for sample in turn), reported=reported)


def _too_few(request: SampleRequest, num_there: int, num_asked: int) -> str:
    reasons = [
        f"{count} x {reason.partition(': ')[2]}"
        for reason, count in request.reported.items()
        if reason.startswith(f"{request.task}: ")
    ]
    left_out = f" (not taken: {'; '.join(reasons)})" if reasons else ""
    return (
        f"task {request.task}: its files hold {num_there} samples of {request.length_tokens} tokens for the "
        f"{request.split} split, {num_asked} were asked for{left_out}: ask for fewer, change the length, or give more "
        f"of {task_info(request.task).source}"
    )
