"""How an answer is scored: each task's own metric, on texts or on the log-likelihoods of options.

Not here: fidelity to the full cache and perplexity, measured on probabilities (`kvpolicy.inference.likelihood`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from kvpolicy.benchmarks.registry import task_info
from kvpolicy.errors import InputError
from kvpolicy.text.sample import Sample


def string_match(prediction: str, references: Sequence[str], *, match: Literal["all", "any"] = "all") -> float:
    """How many references are substrings of a prediction, ignoring case.

    RULER's metric (arXiv 2404.06654, section 3; NVIDIA/RULER, `eval/synthetic`).

    Args:
        prediction: What the model wrote.
        references: What is looked for.
        match: `all` gives the share of references found; `any` gives 1 if at least one is found, else 0.

    Raises:
        InputError: There is no reference.
    """
    _check_references("string match", references)
    lowered = prediction.lower()
    matches = [reference.lower() in lowered for reference in references]
    return float(any(matches)) if match == "any" else sum(matches) / len(matches)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L of a prediction: the F1 of the longest common subsequence of words, with the best of the references.

    Lin (2004), "ROUGE: A Package for Automatic Evaluation of Summaries", section 3, sentence level with beta = 1. Words
    are what blanks separate, as they are. Departure: LongBench takes the summary level of the `rouge` package, which
    splits sentences at full stops and counts every distinct word once; here the whole text is one sequence.

    Raises:
        InputError: There is no reference.
    """
    _check_references("ROUGE-L", references)
    return max(_rouge_l_of(prediction.split(), reference.split()) for reference in references)


def retrieval(prediction: str, references: Sequence[str]) -> float:
    """Share of the numbers in a prediction that are the reference's: LongBench's score of passage retrieval.

    Raises:
        InputError: No reference has a number.
    """
    numbers = [number.group() for reference in references if (number := re.search(r"\d+", reference))]
    _check_references("retrieval", numbers)
    written = re.findall(r"\d+", prediction)
    return max(written.count(number) for number in numbers) / len(written) if written else 0.0


def answer_metric(task: str) -> str:
    """The metric of a task that scores what a model writes.

    Raises:
        InputError: There is none.
    """
    metrics = task_info(task).metrics
    for metric in metrics:
        if metric in _RULES:
            return metric
    raise InputError(f"task {task} scores no text that the model writes, but {', '.join(metrics)}")


def score_answer(sample: Sample, prediction: str) -> float:
    """Score of what a model wrote, by the rule of the sample's task, from 0 to 1.

    Raises:
        InputError: The task scores no text that the model writes.
    """
    return _RULES[answer_metric(sample.task)](prediction, sample)


_RULES: Mapping[str, Callable[[str, Sample], float]] = {
    "string_match": lambda text, sample: string_match(text, sample.references, match=task_info(sample.task).match),
    "rouge_l": lambda text, sample: rouge_l(text, sample.references),
    "retrieval": lambda text, sample: retrieval(text, sample.references),
}


def choose_option(log_likelihoods: Sequence[float], num_bytes: Sequence[int] | None = None) -> int:
    """The option that a model finds the likeliest; of equals the first.

    Args:
        log_likelihoods: Of every option, summed over its tokens, in nats.
        num_bytes: Of every option; log-likelihoods are divided by them if given (lm-evaluation-harness, `acc_norm`).

    Raises:
        InputError: There are no options, or not as many numbers of bytes.
    """
    if not log_likelihoods:
        raise InputError("choosing an option needs at least one log-likelihood, got none")
    if num_bytes is None:
        scores = list(log_likelihoods)
    elif len(num_bytes) == len(log_likelihoods) and all(count > 0 for count in num_bytes):
        scores = [value / count for value, count in zip(log_likelihoods, num_bytes, strict=True)]
    else:
        raise InputError(f"num_bytes is {num_bytes}, expected {len(log_likelihoods)} numbers above 0")
    return max(range(len(scores)), key=scores.__getitem__)


def score_options(sample: Sample, log_likelihoods: Sequence[float]) -> dict[str, float]:
    """Whether the right option has the highest log-likelihood, by every metric that the sample's task has of it.

    Args:
        sample: A sample with options.
        log_likelihoods: Of every option, summed over its tokens.

    Returns:
        `accuracy`, and `accuracy_normalised` (by bytes, the blank before an option not counted) where the task has it.

    Raises:
        InputError: The numbers of options and of log-likelihoods differ.
    """
    if len(log_likelihoods) != len(sample.options):
        raise InputError(
            f"sample {sample.sample_id}: {len(log_likelihoods)} log-likelihoods for {len(sample.options)} options"
        )
    lengths = [len(option.strip().encode()) for option in sample.options]
    chosen = {
        "accuracy": choose_option(log_likelihoods),
        "accuracy_normalised": choose_option(log_likelihoods, lengths),
    }
    metrics = task_info(sample.task).metrics
    return {name: float(sample.options[place] == sample.answer) for name, place in chosen.items() if name in metrics}


def _rouge_l_of(prediction: Sequence[str], reference: Sequence[str]) -> float:
    common = _common_length(prediction, reference)
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, a row of the table at a time."""
    row = [0] * (len(second) + 1)
    for word in first:
        above_left = 0
        for place, other in enumerate(second, start=1):
            above = row[place]
            row[place] = above_left + 1 if word == other else max(above, row[place - 1])
            above_left = above
    return row[-1]


def _check_references(metric: str, references: Sequence[str]) -> None:
    if not references:
        raise InputError(f"{metric} needs at least one reference, got none")
