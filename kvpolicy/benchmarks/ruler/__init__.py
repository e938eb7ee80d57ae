"""RULER: thirteen synthetic long-context tasks at any length (arXiv 2404.06654, NVIDIA/RULER).

The prompts are RULER's; the modules name what differs. Not here: judging answers (`kvpolicy.benchmarks.scoring`).
"""

from kvpolicy.benchmarks.ruler.generator import generate, ruler_samples
from kvpolicy.benchmarks.ruler.tasks import BENCHMARK, DEFAULT_TASKS, RULER_TASKS, VERSION, RulerTask
from kvpolicy.benchmarks.ruler.texts import RulerTexts, read_texts
from kvpolicy.benchmarks.task import TaskInfo
from kvpolicy.names import SPLITS

__all__ = [
    "BENCHMARK",
    "DEFAULT_TASKS",
    "RULER_TASKS",
    "SPLITS",
    "TASKS",
    "VERSION",
    "RulerTask",
    "RulerTexts",
    "generate",
    "read_texts",
    "ruler_samples",
]

TASKS = tuple(
    TaskInfo(
        benchmark=BENCHMARK,
        version=VERSION,
        task=task.name,
        source=task.text,
        metrics=("string_match",),
        max_new_tokens=task.max_new_tokens,
        match=task.match,
        description=task.description,
    )
    for task in RULER_TASKS.values()
)
