"""Training objectives against each other on the same traces: policy gradient and supervision, several seeds each."""

import dataclasses
from typing import Any

from flows.pipeline import find_before, pipeline_flow
from flows.plan import planned, serving
from flows.request import Request
from flows.stages import run_works
from kvpolicy.results.objectives import ObjectiveOutcome, ObjectiveRow, compare_objectives
from kvpolicy.results.statistics import Bootstrap
from storage.catalog.catalog import Catalog
from storage.home import Home
from storage.tables.lance_table import quote
from tasks.framework.references import TrainedRef
from tasks.framework.stage import StageOutcome
from tasks.train import TrainingWork


@pipeline_flow
def ablate(**options: Any) -> list[ObjectiveRow]:
    """Train with every objective and seed on the collected traces; the lowest held-out cost first.

    Everything but the objective is as the preset says, also the learning rate, which others may want lower. Each
    training is a stage as any other: its policy set is kept, can be evaluated (`kvp evaluate --objective`), and is
    found again. It serves the request that would train it alone, so that it can be repeated from its record.
    """
    with planned(**options) as plan:
        find_before("train", plan)
        config, choices = plan.config.ablate, options["choices"]
        outcomes: list[ObjectiveOutcome] = []
        for name in config.compared:
            settings = [f"train.objective={name}", f"evaluate.num_policy_seeds={config.num_seeds}"]
            alone = dataclasses.replace(choices, settings=[*(choices.settings or []), *settings])
            request = Request.make(preset=options["preset"], model=options["model"], seed=plan.seed, choices=alone)
            with serving(plan.home, request):
                works = list(TrainingWork.planned(dataclasses.replace(plan, config=request.config)))
                outcomes += [_outcome(plan.home, name, trained, stage) for trained, stage in run_works(works)]
        return list(compare_objectives(outcomes, Bootstrap(seed=plan.seed), reference=config.compared[0]))


def _outcome(home: Home, objective: str, trained: TrainedRef, stage: StageOutcome) -> ObjectiveOutcome:
    catalog, of_run = Catalog(home), f"run_id = {quote(stage.run_id)}"
    heads = sorted(catalog.rows("heads", of_run, ["head", "heldout_cost"]), key=lambda row: row["head"])
    seconds = catalog.rows("metrics", f"{of_run} AND name = 'seconds'", ["value"])
    return ObjectiveOutcome(
        objective=objective,
        seed=trained.seed,
        heldout_cost=tuple(row["heldout_cost"] for row in heads),
        train_s=max(row["value"] for row in seconds),
    )
