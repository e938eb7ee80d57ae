"""The flows: collect, train and evaluate, and `retrain`, which chains them. Wiring only.

Each flow may run alone: what it needs from earlier stages is found again in the catalog by stage key. In a chain each
stage hands what it has made to the next. References travel, tensors do not.
"""

import time
from collections.abc import Callable
from typing import Any

from prefect import Flow, flow

from flows.display.figures import draw_figures
from flows.display.run_artifact import leave_artifact, leaving_failure
from flows.display.run_progress import showing_run
from flows.display.summary import StageReport, summarise
from flows.plan import planned
from flows.promotion import decide_after_evaluation
from flows.runtime.run_options import Choices, Runner
from flows.stages import FLOWS, expected_parts, find_all, run_all
from kvpolicy.errors import InputError
from kvpolicy.models.reference import EMBEDDED
from kvpolicy.presets.pipeline_config import Preset
from tasks.framework.references import EvaluationRef
from tasks.framework.work import Plan

NO_CHOICES = Choices()
HERE = Runner()


def pipeline_flow(body: Callable[..., Any]) -> Flow:
    """Make a flow that takes what every pipeline takes; its body is given these parameters by name."""

    def run(
        preset: Preset = "demo",
        model: str = EMBEDDED,
        home: str | None = None,
        seed: int = 0,
        choices: Choices = NO_CHOICES,
        *,
        runner: Runner = HERE,
    ) -> Any:
        return body(preset=preset, model=model, home=home, seed=seed, choices=choices, runner=runner)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(run, name, getattr(body, name))
    return flow(name=body.__name__)(run)


@pipeline_flow
def collect(**options: Any) -> StageReport:
    """Run a model over generated prompts; keys, values and importance go into the trace store."""
    return run_alone("collect", **options)


@pipeline_flow
def train(**options: Any) -> StageReport:
    """Train one policy per KV head on the collected traces, with as many seeds as are evaluated; reports the first."""
    return run_alone("train", **options)


@pipeline_flow
def evaluate(**options: Any) -> StageReport:
    """Evaluate the policies and every heuristic on held-out prompts; curves go into MLflow and the catalog."""
    return run_alone("evaluate", **options)


@pipeline_flow
def retrain(**options: Any) -> dict[str, StageReport]:
    """Collect, train and evaluate, one after the other, and decide whether the new policy set becomes champion.

    What is there already is not done again.
    """
    started = time.monotonic()
    with leaving_failure(**options), planned(**options) as plan:
        prepared = StageReport(
            artifact_id=plan.model.artifact_id, run_id="", seconds=time.monotonic() - started, skipped=False
        )
        with showing_run(expected_parts(plan)):
            reports = {"prepare": prepared, **{name: run_in_plan(name, plan) for name in FLOWS}}
            trained, evaluated = reports["train"], reports["evaluate"]
            decide_after_evaluation(
                plan,
                challenger_id=trained.artifact_id,
                evaluation_id=evaluated.artifact_id,
                evaluation_run_id=evaluated.run_id,
            )
    leave_artifact(plan.home, summarise(plan.home, reports))
    return reports


def run_in_plan(name: str, plan: Plan) -> StageReport:
    """Run the stages of a flow, given what the stages before them have made; reports the first of them."""
    started = time.monotonic()
    made = [outcome for kind in FLOWS[name] for outcome in run_all(kind, plan)]
    reference, outcome = made[0]
    if isinstance(reference, EvaluationRef):
        draw_figures(plan.home, reference)
    return StageReport(
        artifact_id=reference.artifact_id,
        run_id=outcome.run_id,
        seconds=time.monotonic() - started,
        skipped=all(outcome.skipped for _, outcome in made),
    )


def run_alone(name: str, **options: Any) -> StageReport:
    """Plan and run the stages of a flow on what earlier runs have made.

    Raises:
        InputError: If something that they read has not been made.
    """
    with planned(**options) as plan:
        find_before(name, plan)
        return run_in_plan(name, plan)


def find_before(name: str, plan: Plan) -> None:
    """Find what a flow reads of what earlier flows have made.

    Raises:
        InputError: If something that it reads has not been made.
    """
    earlier = list(FLOWS)[: list(FLOWS).index(name)]
    missing = [flow_name for flow_name in earlier if not find_all(FLOWS[flow_name], plan)]
    if not list(FLOWS[name][0].planned(plan)):
        raise InputError(
            f"{name}: {plan.home.path} has nothing that `kvp {missing[0]}` made for this model, preset, tasks, seed "
            f"and code: run `kvp {missing[0]} --preset {plan.config.preset}` with the same options first"
        )
