"""OASST2: conversations of people with assistants, joined to long dialogues whose later turns are predicted."""

from kvpolicy.benchmarks.oasst2.dialogues import BENCHMARK, TASKS, VERSION, dialogues, fingerprint

__all__ = ["BENCHMARK", "TASKS", "VERSION", "dialogues", "fingerprint"]
