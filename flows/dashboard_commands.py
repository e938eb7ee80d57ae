"""The command `kvp dashboard`: figures of a home in the browser."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.command_options import HomeOption
from flows.process import configure_libraries, home_path
from storage.home import Home
from storage.tables import quote

if TYPE_CHECKING:
    from dashboards.app.comparing import ComparisonQuestion

DEFAULT_PORT = 8420
PortOption = Annotated[int, typer.Option(help="Of the dashboard on this machine; 0 for a free one", min=0, max=65535)]


def dashboard(port: PortOption = DEFAULT_PORT, home: HomeOption = None) -> None:
    """Show budget curves, heads, tokens, lineage and runs in the browser, until it is interrupted; it only reads."""
    configure_libraries()
    opened = Home.open(home_path(home), create=False)
    from dashboards.app.server import HOST, make_app, open_port, serve

    with open_port(port) as listening:
        app = make_app(opened, lambda: running_services(opened), lambda question: compare_scores(opened, question))
        print(f"http://{HOST}:{listening.getsockname()[1]}", flush=True)
        serve(app, listening)


def running_services(home: Home) -> Mapping[str, str]:
    """URLs of Prefect's and MLflow's pages, of those that `kvp up` has started for a home and that still run."""
    from flows.service_process import MLFLOW, SERVER, recorded

    named = {"prefect": recorded(home, SERVER), "mlflow": recorded(home, MLFLOW)}
    return {name: service.url for name, service in named.items() if service is not None and service.runs}


def compare_scores(home: Home, question: "ComparisonQuestion") -> list[dict[str, Any]]:
    """Compare methods within a task, or by some seeds, as the evaluation itself compared them over all.

    Args:
        home: The home.
        question: Which curves.

    Returns:
        Rows like those of the table `comparisons`; none if the scores of the samples are lost.
    """
    from kvpolicy.comparisons import compare_methods
    from kvpolicy.curves import MEAN_TASK, ExampleScore
    from storage.catalog import Catalog

    catalog = Catalog(home)
    wanted = {name: getattr(question, name) for name in ("run_id", "benchmark", "setting", "metric")}
    wanted |= {} if question.task == MEAN_TASK else {"task": question.task}
    where = " AND ".join(f"{column} = {quote(value)}" for column, value in wanted.items())
    rows = catalog.rows("scores", where, [entry.name for entry in fields(ExampleScore)])
    scores = [ExampleScore(**row) for row in rows if (row["method"], row["seed"]) in question.seeds]
    if not scores:
        return []
    (run,) = catalog.rows("runs", f"run_id = {quote(question.run_id)}", ["parameters_json", "seed"])
    judged = json.loads(run["parameters_json"])["evaluate"]
    statistics = {name: judged[name] for name in ("num_resamples", "confidence")}
    return [found.to_row() for found in compare_methods(scores, seed=run["seed"] or 0, **statistics)]
