"""Choices that several pages begin with: which model and evaluation, benchmark and setting."""

from collections.abc import Callable, Mapping, Sequence

from dashboards.app.content import Nothing
from dashboards.app.records import Evaluation, Records, Row
from dashboards.app.selection import Selection, page_url
from dashboards.figures.styles import setting_label
from dashboards.grouping import grouped, place_of
from dashboards.rendering.formats import moment
from dashboards.rendering.table import Link

FindServices = Callable[[], Mapping[str, str]]
"""Gives the URLs of Prefect's and MLflow's pages, as `prefect` and `mlflow`, of those that run."""


def choose_evaluation(records: Records, selection: Selection) -> Evaluation:
    """The model and one of its evaluations, the newest by default.

    Raises:
        Nothing: there is none in the home.
    """
    evaluations = records.evaluations()
    if not evaluations and records.policy_sets_with_pairs():
        raise Nothing("This home has policies and no evaluation yet.", "kvp evaluate")
    if not evaluations:
        raise Nothing("This home has no evaluation yet.", "kvp run --preset smoke")
    asked = next((e for e in evaluations if e.id == selection.text("evaluation")), None)
    models = {evaluation.model_id: evaluation.model_name for evaluation in evaluations}
    alike = list(models.values())
    labels = [(key, name if alike.count(name) == 1 else f"{name} ({key[-8:]})") for key, name in models.items()]
    default = asked.model_id if asked else evaluations[0].model_id
    model = selection.one("model", "Model", labels, default=default, resets=["evaluation"])
    of_model = [evaluation for evaluation in evaluations if evaluation.model_id == model]
    options = [(e.id, f"{moment(e.ended_at)}, {_samples(e)} ({short_id(e.id)})") for e in of_model]
    chosen = selection.one("evaluation", "Evaluation", options, resets=["sample", "head"])
    return next(evaluation for evaluation in of_model if evaluation.id == chosen)


def _samples(evaluation: Evaluation) -> str:
    """An evaluation's name without its model's, which another menu has."""
    return evaluation.name.removeprefix(evaluation.model_name).removeprefix(" on ") or evaluation.name


def choose_place(selection: Selection, rows: Sequence[Row]) -> list[Row]:
    """The rows of one benchmark and setting, which no figure mixes with others."""
    places = grouped(rows, place_of)
    benchmark = selection.one("benchmark", "Benchmark", sorted({benchmark for benchmark, _ in places}))
    settings = sorted(setting for benchmark_of_place, setting in places if benchmark_of_place == benchmark)
    setting = selection.one("setting", "Setting", [(name, setting_label(name)) for name in settings])
    return places[benchmark, setting]


def origin(evaluation: Evaluation, others: Sequence[str] = ()) -> list[Link]:
    """Where the numbers of a page come from, as links into the lineage."""
    ids = [evaluation.id, evaluation.run_id, *others]
    return [lineage_link(name) for name in ids]


def short_id(any_id: str) -> str:
    """The first characters of the digest in an id, by which people tell ids apart."""
    return any_id[-16:][:6]


def lineage_link(any_id: str, text: str = "") -> Link:
    """A link to the lineage of an artifact or run."""
    return Link(text=text or any_id, url=page_url("lineage", {"id": any_id}))


def mlflow_link(services: Mapping[str, str], mlflow_run_id: str) -> Link | None:
    """A link to MLflow's page of a run, while MLflow runs; None for what has no run."""
    if "mlflow" not in services or not mlflow_run_id:
        return None
    return Link(text="MLflow", url=f"{services['mlflow']}/#/runs/{mlflow_run_id}")
