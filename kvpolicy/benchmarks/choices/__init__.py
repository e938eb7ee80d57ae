"""Multiple choice, scored by the log-likelihood of every option after a context of solved exemplars."""

from kvpolicy.benchmarks.choices.questions import TASKS, VERSION, fingerprint, questions

__all__ = ["TASKS", "VERSION", "fingerprint", "questions"]
