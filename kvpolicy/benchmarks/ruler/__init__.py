"""RULER: thirteen synthetic long-context tasks at any length (arXiv 2404.06654, NVIDIA/RULER).

The prompts are RULER's; the modules name what differs. Not here: scoring answers (`kvpolicy.benchmarks.scoring`).
"""

from kvpolicy.benchmarks.ruler.generator import generate, ruler_samples
from kvpolicy.benchmarks.ruler.tasks import BENCHMARK, DEFAULT_TASKS, RULER_TASKS, VERSION, RulerTask
from kvpolicy.benchmarks.ruler.texts import RulerTexts, read_texts

__all__ = [
    "BENCHMARK",
    "DEFAULT_TASKS",
    "RULER_TASKS",
    "TASKS",
    "VERSION",
    "RulerTask",
    "RulerTexts",
    "generate",
    "read_texts",
    "ruler_samples",
]

TASKS = tuple(RULER_TASKS.values())
