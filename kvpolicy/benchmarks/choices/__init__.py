"""Multiple choice, judged by the log-likelihood of every option after a context of solved exemplars."""

from kvpolicy.benchmarks.choices.questions import TASKS, VERSION, questions

__all__ = ["TASKS", "VERSION", "questions"]
