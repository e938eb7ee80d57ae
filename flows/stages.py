"""The stages of the pipeline, in the order in which they run, and running all of one kind.

What a stage is stands beside its tasks (`tasks.framework.work`); `flows.runners.fan_out` knows where parts run.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from flows.display.run_progress import StageProgress
from flows.runners.fan_out import run_parts
from storage.catalog.catalog import Catalog
from storage.catalog.requests import mean_seconds
from tasks.collect import CollectionWork
from tasks.framework.stage import StageOutcome, find_completed
from tasks.framework.work import Plan, Work, checked, stage_name
from tasks.prompts import PromptsWork
from tasks.publish import EvaluationWork
from tasks.soft_tokens import SoftTokenWork
from tasks.train import TrainingWork

Made = tuple[Any, StageOutcome]

# Flow -> the stages that it runs. Their prompts are written before any of them.
FLOWS: Mapping[str, tuple[type[Work], ...]] = {
    "collect": (CollectionWork,),
    "train": (TrainingWork, SoftTokenWork),
    "evaluate": (EvaluationWork,),
}
STAGES = checked([PromptsWork, *chain.from_iterable(FLOWS.values())])


def run_all(kind: type[Work], plan: Plan) -> list[Made]:
    """Run all stages of a kind in a plan, which notes what they make."""
    works = list(kind.planned(plan))
    made = run_works(works)
    for work, (reference, _) in zip(works, made, strict=True):
        plan.made[stage_name(work)] = reference
    return made


def run_works(works: Sequence[Work]) -> list[Made]:
    """Run stages of one kind: the parts of all of them at once, then what each comes to."""
    if not works:
        return []
    first = works[0]
    if not first.title:
        return [work.finish([]) for work in works]
    parts = [_missing_parts(work) for work in works]
    returned = iter(run_parts(first.title, list(chain.from_iterable(parts)), gpu_bytes=first.gpu_bytes))
    return [work.finish(list(islice(returned, len(alike)))) for work, alike in zip(works, parts, strict=True)]


def find_all(kinds: Iterable[type[Work]], plan: Plan) -> bool:
    """Find what the stages of some kinds in a plan have made, and note it; whether everything is there."""
    is_there = True
    for kind in kinds:
        for work in list(kind.planned(plan)):
            run = find_completed(plan.home, work.stage)
            if run is None:
                is_there = False
            else:
                plan.made[stage_name(work)] = kind.refer(plan.home, run.outputs[kind.result], plan.seed)
    return is_there


def expected_parts(plan: Plan) -> dict[str, StageProgress]:
    """The stages of a plan that have parts, with what their parts took in earlier runs of the preset in this home."""
    took = mean_seconds(Catalog(plan.home), plan.config.preset)
    expected = {}
    for kind in STAGES:
        if kind.title and (total := kind.count_parts(plan)):
            part = next(iter(kind.part_kinds), kind.name)
            expected[kind.title] = StageProgress(total=total, part_s=took.get(part))
    return expected


def _missing_parts(work: Work) -> list[Any]:
    return work.parts() if find_completed(work.home, work.stage) is None else []
